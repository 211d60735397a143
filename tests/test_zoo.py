"""Users' models of zoo_models.py against FedAvg in plain PyTorch; `python tests/zoo.py` has all."""

import pytest
import zoo

TELLING = (
    "CifarNet",
    "GreyView",
    "BottleneckLeNet",
    "StatisticsAsParameters",
    "GradualUnfreezing",
    "BooleanMask",
    "AnchoredWeights",
    "ModelFedConLogits",
    "MeanTeacher",
    "CentredOutput",
    "Compiled",
    "CNNDropOut",
    "MergedLoRA",
    "HeadAndFeatures",
    "Lazy",
    "TwoNames",
    "PackedLSTM",
    "SparseBag",
    "Bert",
    "LayerDrop",
    "MixtureOfExperts",
)


@pytest.mark.parametrize("name", TELLING)
def test_a_users_model_trains_as_plain_pytorch_trains_it(name):
    ours, plain = zoo.compare(name)
    assert ours == pytest.approx(plain, rel=1e-10)
