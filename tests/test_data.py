"""data.py against the raw bytes of data sets, NumPy, scikit-learn and brute force."""

import dataclasses
import math
import os
import shutil
import struct
import zipfile
import zlib
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import scipy
import torch
from ordinary import normalise, random_images, random_text
from PIL import Image
from torchvision import datasets

import data
from errors import UsageError

DOUBLE = torch.float64

# ----------------------------------------------------------------------------------------- digits


def test_images_are_normalised_once_as_numpy_does():
    colours = random_images(16, 3)
    for split, x in (("train", colours.x_train), ("test", colours.x_test)):
        images = colours.images(split, DOUBLE)
        expected = normalise(colours, x)
        assert torch.allclose(images.permute(0, 3, 1, 2), expected, rtol=0, atol=1e-12)
        assert colours.images(split, DOUBLE) is images
        assert colours.images(split).dtype == torch.float32
        assert x.dtype == torch.uint8
    text = random_text()
    assert text.images("train") is text.x_train


# ------------------------------------------------------------------------------------------- .npz

SAMPLES = np.random.default_rng(0).integers(0, 256, (30, 18, 18, 3), dtype=np.uint8)
LABELS = np.arange(30) % 3
BLACK = np.zeros((20, 18, 18, 3), np.uint8)


def write_npz(path, **changes):
    arrays = {"x_train": SAMPLES[:20], "y_train": LABELS[:20]}
    arrays |= {"x_test": SAMPLES[20:], "y_test": LABELS[20:]}
    np.savez(path, **arrays | changes)


def load_npz(folder, **changes) -> data.Data:
    write_npz(folder / "a.npz", **changes)
    data.read_data.cache_clear()
    return data.load_data(str(folder / "a.npz"))


def test_npz(tmp_path):
    colours = load_npz(tmp_path)
    assert np.array_equal(colours.x_train, SAMPLES[:20])
    assert np.array_equal(colours.y_train, LABELS[:20])
    assert np.array_equal(colours.x_test, SAMPLES[20:])
    assert np.array_equal(colours.y_test, LABELS[20:])
    assert colours.classes == 3
    assert colours.owner is None
    assert np.allclose(colours.mean, SAMPLES[:20].mean((0, 1, 2), dtype=float))
    assert np.allclose(colours.std, SAMPLES[:20].std((0, 1, 2), dtype=float))


def test_small_images_are_padded_with_black(tmp_path):
    write_npz(tmp_path / "a.npz")
    padded = data.load_data(str(tmp_path / "a.npz"), side=33)
    margins = ((0, 0), (7, 8), (7, 8), (0, 0))
    assert np.array_equal(padded.x_train, np.pad(SAMPLES[:20], margins))
    assert np.array_equal(padded.x_test, np.pad(SAMPLES[20:], margins))
    large = data.load_data(str(tmp_path / "a.npz"), side=9)
    assert np.array_equal(large.x_train, SAMPLES[:20])


@pytest.mark.parametrize("kind", [np.uint8, np.int32, np.uint64, ">i8"])
def test_npz_of_floats_without_channels_with_owners(kind, tmp_path):
    grey = SAMPLES[..., 0]
    x_test = (grey[20:] / 255).astype(np.float32)
    owner = np.arange(20) // 4
    y_train = LABELS[:20].astype(kind)
    found = load_npz(tmp_path, x_train=grey[:20] / 255, x_test=x_test, owner=owner, y_train=y_train)
    assert np.array_equal(found.x_train[..., 0], grey[:20])
    assert np.array_equal(found.x_test[..., 0], grey[20:])
    assert np.array_equal(found.y_train, LABELS[:20])
    assert found.owner.tolist() == owner.tolist()


def test_black_images_have_finite_values(tmp_path):
    assert load_npz(tmp_path, x_train=BLACK).images("train").isfinite().all()


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"x_train": np.full(BLACK.shape, np.nan)}, "NaN, infinity [^\\n]*in 20 samples"),
        ({"x_test": np.where(np.arange(30).reshape(10, 3) == 7, np.inf, 0.5)}, "first in 2"),
        ({"x_test": np.full((10, 3), np.inf, np.float16)}, "first in 0"),
        ({"x_test": np.full((10, 3), 9.97e36)}, "above 1e.18"),  # what NetCDF fills gaps with
        ({"x_train": BLACK.astype(np.int64)}, r"astype\(np.uint8\)"),
        ({"x_train": BLACK[0, 0]}, "uint8"),
        ({"x_train": BLACK[:5]}, "wanted 5 integers"),
        ({"x_train": BLACK[:, :9]}, "wanted one kind"),
        ({"x_train": BLACK[:0], "y_train": LABELS[:0]}, r"\(0, 18"),
        ({"x_train": BLACK[..., None]}, "uint8"),
        ({"x_train": np.array(3, np.uint8)}, "uint8"),
        ({"x_train": np.array(["a"] * 20)}, "<U1"),
        ({"x_train": SAMPLES[:20].reshape(20, -1)}, "reshape"),
        ({"x_train": np.tile(SAMPLES[:20], 2)}, "wanted one kind"),
        ({"x_train": np.tile(SAMPLES[:20], 2).transpose(0, 3, 1, 2)}, "channels first"),
        ({"x_train": SAMPLES[:20].transpose(0, 3, 1, 2)}, "channels first"),
        ({"x_train": np.zeros((20, 6, 5, 5))}, "channels first"),
        ({"x_train": np.zeros((20, 6, 4, 4))}, "wanted one kind"),
        ({"x_train": np.zeros((20, 3, 17, 20))}, "channels first"),
        ({"x_train": np.zeros((20, 3, 16, 20))}, "wanted one kind"),
        ({"x_train": SAMPLES[:20].transpose(0, 3, 1, 2) / 255}, "channels first"),
        ({"x_train": np.full((20, 6), -1)}, "text"),
        ({"x_train": SAMPLES[:20] // 128}, "one scale"),
        ({"y_train": np.array(3)}, "wanted 20 integers"),
        ({"y_train": LABELS[:20, None]}, "wanted 20 integers"),
        ({"y_train": LABELS[:20].astype(float)}, "wanted 20 integers"),
        ({"y_train": np.eye(3)[LABELS[:20]]}, "wanted 20 integers"),
        ({"y_train": LABELS[:20].astype(str)}, "return_inverse=True"),
        ({"y_train": LABELS[:20] - 1}, "holds -1 to 1"),
        ({"y_train": LABELS[:20] * 0}, "y_test holds 0 to 2; wanted 0 to 0"),
        (
            {"y_train": LABELS[:20] + 1, "y_test": LABELS[20:] + 1},
            "holds 3 of 4 labels .*return_inverse",
        ),
        ({"y_train": LABELS[:20] * 0, "y_test": LABELS[20:] * 0}, "holds 1 of 1 labels .*sorted"),
        ({"y_train": LABELS[:20] * 10**12}, "holds 3 of 2000000000001 labels"),
        ({"y_train": np.array([None] * 20)}, "Object arrays cannot be loaded"),
        ({"y_test": np.arange(10)}, "holds 0 to 9; wanted 0 to 2"),
        ({"y_train": LABELS[:20], "classes": 2}, "holds 0 to 2; wanted 0 to 1"),
        ({"classes": 3.5}, "only integer"),
        ({"owner": np.arange(3)}, r"owner is \(3,\)"),
        ({"owner": np.where(LABELS[:20], 1.0, np.nan)}, "7 missing"),
    ],
)
def test_an_npz_of_another_meaning_is_refused_in_one_line(tmp_path, changes, said):
    """The line says what was found and what to do."""
    if "x_test" in changes:
        changes = changes | {"x_train": np.ones((20, 3))}
    with pytest.raises(UsageError, match=rf"^--dataset [^\n]*a.npz: [^\n]*{said}[^\n]*$"):
        load_npz(tmp_path, **changes)


ARRAYS = {"x_train": SAMPLES[:20], "y_train": LABELS[:20], "x_test": SAMPLES[20:]}
ARRAYS |= {"y_test": LABELS[20:]}


@pytest.mark.parametrize("convert", [list, np.ndarray.tolist, torch.from_numpy])
def test_lists_and_tensors_are_read_as_the_arrays(convert):
    given = {name: convert(array) for name, array in ARRAYS.items()}
    if convert is np.ndarray.tolist:  # numbers without a type: floats are the only reading
        given = {
            name: convert(array / 255 if array.ndim == 4 else array)
            for name, array in ARRAYS.items()
        }
    owner = ["ann" if i < 9 else "bob" for i in range(20)]
    found = data.from_arrays(**given, owner=owner)
    wanted = data.from_arrays(**ARRAYS)
    assert torch.equal(found.images("train"), wanted.images("train"))
    assert torch.equal(found.x_test, wanted.x_test)
    assert torch.equal(found.y_train, wanted.y_train)
    assert found.owner.tolist() == owner


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"x_train": np.ma.masked_equal(SAMPLES[:20], 3)}, "x_train has masked entries"),
        ({"x_train": pd.DataFrame({"a": [1.5, "b"] * 10})}, "x_train is object"),
        ({"x_train": scipy.sparse.csr_matrix(np.eye(20))}, "x_train is object"),
        ({"x_train": torch.eye(20).to_sparse()}, r"to_dense\(\)"),
        ({"owner": pd.array(["ann", None] * 10, dtype="string")}, "10 missing"),
        ({"x_train": np.ones((20, 3), np.longdouble)}, "float128|longdouble"),
        ({"x_train": torch.ones(20, 3, dtype=torch.bfloat16)}, "BFloat16"),
    ],
)
def test_objects_of_other_libraries_are_refused_in_one_line(changes, said):
    with pytest.raises(ValueError, match=f"^[^\n]*{said}[^\n]*$"):
        data.from_arrays(**ARRAYS | changes)


def test_labels_that_have_one_reading(tmp_path):
    is_two = load_npz(tmp_path, y_train=LABELS[:20] == 2, y_test=LABELS[20:] == 2)
    assert is_two.classes == 2
    assert is_two.y_train.tolist() == [int(label == 2) for label in LABELS[:20]]
    text = {"x_train": np.full((20, 4), 79), "x_test": np.full((10, 4), 0)}
    assert load_npz(tmp_path, **text).classes == 3  # not the 80 characters
    assert load_npz(tmp_path, **text, classes=80).classes == 80
    assert load_npz(tmp_path, y_train=LABELS[:20] * 0, y_test=LABELS[20:], classes=4).classes == 4


def test_images_of_zeros_and_ones_are_as_those_of_black_and_white():
    """Nets read the same numbers; bytes that reach 255 are divided by 1 or more, as ever."""
    bits = SAMPLES // 128
    dark = data.from_arrays(bits[:20], LABELS[:20], bits[20:], LABELS[20:])
    bright = data.from_arrays(bits[:20] * 255, LABELS[:20], bits[20:] * 255, LABELS[20:])
    assert torch.allclose(dark.images("train"), bright.images("train"), atol=1e-5)
    assert dark.images("train", DOUBLE).std(correction=0).item() == pytest.approx(1)


# ------------------------------------------------------------------------------------------ floats


FLOATS = {
    "images": ((18, 18, 3), np.float64),
    "series": ((128, 9), np.float32),
    "table": ((7,), np.float32),
    "volumes": ((4, 5, 6, 2), np.float16),
}


@pytest.mark.parametrize("kind", FLOATS)
def test_floats_stay_floats_and_nets_read_them_standardised(kind):
    """By the training set's moments of each entry of the last axis; what is passed in stays."""
    shape, dtype = FLOATS[kind]
    rng = np.random.default_rng(0)
    x = 5 + rng.standard_normal((30, *shape)).astype(dtype) * np.arange(
        1, shape[-1] + 1, dtype=dtype
    )
    x[..., -1] = 0.1  # constant
    before = x.copy()
    found = data.from_arrays(x[:20], LABELS[:20], x[20:], LABELS[20:])
    rows = x[:20].reshape(-1, shape[-1]).astype(float)
    std = rows.std(0)
    std[-1] = 1
    for split, raw in (("train", x[:20]), ("test", x[20:])):
        wanted = (raw.astype(float) - rows.mean(0)) / std
        for again in (found, dataclasses.replace(found)):
            assert np.allclose(again.images(split, DOUBLE), wanted, atol=1e-6)
            assert again.images(split).dtype == torch.float32
    assert np.array_equal(found.x_train, before[:20])
    assert np.array_equal(x, before)
    low, high = found.limits
    one_scale = kind == "images"
    assert np.array_equal(low, rows.min(None if one_scale else 0) + np.zeros(shape[-1]))
    high_of_columns = np.append(rows.max(0)[:-1], 1 + rows[0, -1])  # the constant one: 1 more
    assert np.array_equal(high, rows.max() + 0 * low if one_scale else high_of_columns)


def test_large_numbers_that_hardly_differ_keep_their_digits():
    """Seconds since 1970: in float32 neighbours 60 s apart are the same number."""
    x = 1.7e9 + np.arange(30.0)[:, None]
    found = data.from_arrays(x[:20], LABELS[:20], x[20:], LABELS[20:]).images("train")
    wanted = (np.arange(20.0) - 9.5) / np.arange(20.0).std()
    assert np.allclose(found[:, 0], wanted, atol=1e-5)


def test_floats_in_0_1_are_bytes_only_if_no_digit_is_lost():
    """Bytes / 255 give the bytes' numbers bit for bit; others, and series of 0 and 1, stay."""
    wanted = data.from_arrays(**ARRAYS)
    scaled = (SAMPLES / 255).astype(np.float32)
    found = data.from_arrays(scaled[:20], LABELS[:20], scaled[20:], LABELS[20:])
    assert torch.equal(found.images("test"), wanted.images("test"))
    fine = np.random.default_rng(0).random((30, 18, 18, 3))
    for x in (fine, fine[..., 0], np.eye(18)[SAMPLES[..., 0, 0] // 16]):
        found = data.from_arrays(x[:20], LABELS[:20], x[20:], LABELS[20:])
        assert np.array_equal(found.x_train, x[:20])
        if x.ndim == 4:
            assert [limit.tolist() for limit in found.limits] == [[0] * 3, [1] * 3]


def write_bomb(path):
    """An .npz of a kilobyte whose header promises 10^15 bytes."""
    shape = "(1000000000, 1000, 1000, 1)"
    head = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    array = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head.encode()
    with zipfile.ZipFile(path, "w") as file:
        for name in ("x_train", "y_train", "x_test", "y_test"):
            file.writestr(f"{name}.npy", array)


@pytest.mark.parametrize(
    "name, said",
    [
        ("cut.npz", "not an .npz file"),
        ("text.npz", "not an .npz file"),
        ("array.npz", "not an .npz file"),
        ("flipped.npz", "CRC-32"),
        ("names.npz", "x_train is not a file"),
        ("bomb.npz", "fit into memory"),
        ("absent.npz", "not one of"),
        ("absent", "not one of"),
    ],
)
def test_npz_that_is_none(name, said, tmp_path):
    write_npz(tmp_path / "a.npz")
    whole = (tmp_path / "a.npz").read_bytes()
    (tmp_path / "cut.npz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.npz").write_text("hello")
    flipped = whole[:9000] + bytes([whole[9000] ^ 4]) + whole[9001:]
    (tmp_path / "flipped.npz").write_bytes(flipped)
    np.savez(tmp_path / "names.npz", x=BLACK)
    with open(tmp_path / "array.npz", "wb") as file:
        np.save(file, BLACK)
    write_bomb(tmp_path / "bomb.npz")
    with pytest.raises(UsageError, match=rf"^--dataset [^\n]*{said}[^\n]*$"):
        data.load_data(str(tmp_path / name))


def test_checksum_is_that_of_every_part():
    arrays = {"x_train": SAMPLES[:10], "y_train": LABELS[:10]}
    arrays |= {"x_test": SAMPLES[10:20], "y_test": LABELS[10:20]}
    content = b"".join(array.tobytes() for array in arrays.values())
    assert data.from_arrays(**arrays).checksum == zlib.crc32(content)
    arrays["owner"] = np.arange(10) // 2
    first = data.from_arrays(**arrays).checksum
    assert data.from_arrays(**arrays).checksum == first
    found = {first}
    for name, array in arrays.items():
        changed = array.copy()
        changed.flat[0] = (changed.flat[0] + 1) % 3
        found.add(data.from_arrays(**arrays | {name: changed}).checksum)
    assert len(found) == 6
    arrays["owner"] = np.array(["b", "c", "d", "e", "f"])[arrays["owner"]]  # by name
    assert data.from_arrays(**arrays).checksum not in found


# ---------------------------------------------------------------------------------------- folders


def write_tree(root, side=18) -> dict:
    """Three PNG files of two classes in train/ and test/; their pixels by (split, place)."""
    rng = np.random.default_rng(0)
    pixels = {}
    for split in ("train", "test"):
        for label, name in enumerate(("cat", "dog")):
            (root / split / name).mkdir(parents=True)
            for i in range(3):
                image = rng.integers(0, 256, (side, side, 3), dtype=np.uint8)
                Image.fromarray(image).save(root / split / name / f"{i}.png")
                pixels[split, 3 * label + i] = image
    return pixels


def test_image_folder(tmp_path):
    """Other files are ignored, folders within a class are read."""
    pixels = write_tree(tmp_path)
    cat = tmp_path / "train" / "cat"
    (cat / "notes.txt").write_text("of the photographer")
    (cat / "more").mkdir()
    (cat / "2.png").rename(cat / "more" / "2.png")
    folder = data.load_data(str(tmp_path))
    assert folder.classes == 2
    splits = {"train": (folder.x_train, folder.y_train), "test": (folder.x_test, folder.y_test)}
    for split, (x, y) in splits.items():
        assert y.tolist() == [0, 0, 0, 1, 1, 1]
        for i in range(6):
            assert np.array_equal(x[i], pixels[split, i])


def test_images_of_other_modes_become_rgb_on_white(tmp_path):
    """Grey, palette, alpha in three forms, and a picture that EXIF turns, by their pixels."""
    write_tree(tmp_path)
    grey = np.arange(324, dtype=np.uint8).reshape(18, 18)
    alpha = np.where(np.arange(324).reshape(18, 18) % 2, 255, 51).astype(np.uint8)
    on_white = np.round(grey * (alpha / 255) + 255 * (1 - alpha / 255))
    mask = Image.fromarray((grey % 2).astype(np.uint8))
    mask.putpalette([0] * 768)  # all black: the drawing is in what is transparent
    turned = Image.Exif()
    turned[0x0112] = 6
    images = {
        "0.png": (Image.fromarray(grey), {}, grey),
        "1.png": (Image.fromarray(grey).convert("P"), {}, grey),
        "2.png": (Image.fromarray(np.dstack([grey, grey, grey, alpha])), {}, on_white),
        "3.png": (Image.merge("LA", [Image.fromarray(grey), Image.fromarray(alpha)]), {}, on_white),
        "4.png": (mask, {"transparency": 0}, np.where(grey % 2, 0, 255)),
        "5.png": (Image.fromarray(grey), {"exif": turned}, grey[::-1].T),
    }
    for name, (image, options, _) in images.items():
        image.save(tmp_path / "train" / "cat" / name, **options)
    found = data.load_data(str(tmp_path)).x_train.numpy().astype(int)
    for i, (name, (_, _, wanted)) in enumerate(images.items()):
        assert np.abs(found[i] - wanted[..., None]).max() <= 1, name  # of rounding


def test_hidden_entries_of_a_folder_are_skipped(tmp_path):
    pixels = write_tree(tmp_path)
    for place in ("train/.ipynb_checkpoints", "train/cat/.ipynb_checkpoints"):
        (tmp_path / place).mkdir()
        shutil.copy(tmp_path / "train" / "dog" / "0.png", tmp_path / place / "0.png")
    (tmp_path / "train" / "cat" / "._0.png").write_bytes(b"Mac OS X")
    found = data.load_data(str(tmp_path))
    assert found.classes == 2
    assert np.array_equal(found.x_train, [pixels["train", i] for i in range(6)])


def huge_png() -> bytes:
    """A PNG of a hundred bytes that says it has 9 * 10^8 pixels."""
    header = struct.pack(">II5B", 30_000, 30_000, 8, 2, 0, 0, 0)
    content = b"\x89PNG\r\n\x1a\n"
    for name, body in ((b"IHDR", header), (b"IDAT", zlib.compress(b"\0")), (b"IEND", b"")):
        checksum = struct.pack(">I", zlib.crc32(name + body))
        content += struct.pack(">I", len(body)) + name + body + checksum
    return content


def other_size(root, image):
    Image.fromarray(np.zeros((9, 9, 3), np.uint8)).save(image)


def sixteen_bits(root, image):
    pixels = np.arange(324, dtype=np.uint16).reshape(18, 18) * 200
    Image.fromarray(pixels).save(image)


DAMAGES = {
    "no test": lambda root, image: shutil.rmtree(root / "test"),
    "no class": lambda root, image: [shutil.rmtree(path) for path in (root / "train").iterdir()],
    "garbage": lambda root, image: image.write_bytes(b"not an image"),
    "cut": lambda root, image: image.write_bytes(image.read_bytes()[:400]),
    "link": lambda root, image: image.with_name("9.png").symlink_to("nowhere"),
    "other size": other_size,
    "16 bits": sixteen_bits,
    "bomb": lambda root, image: image.write_bytes(huge_png()),
    "other classes": lambda root, image: (root / "test" / "cat").rename(root / "test" / "cow"),
    "new class": lambda root, image: (root / "train" / "eel").mkdir(),
    "empty class": lambda root, image: [(root / x / "eel").mkdir() for x in ("train", "test")],
}
SAID = {
    "no test": r"and test/ \[\]; wanted a folder for each class",
    "no class": r"train/ holds the folders \[\]",
    "garbage": "cat/1.png: cannot identify",
    "cut": "cat/1.png",
    "link": "cat/9.png: [^\n]*No such file",
    "other size": "cat/1.png has another size than [^\n]*cat/0.png",
    "16 bits": "cat/1.png: [^\n]*more than 8 bits",
    "bomb": "cat/1.png",
    "other classes": r"\['cat', 'dog'\], and test/ \['cow', 'dog'\]",
    "new class": r"\['cat', 'dog', 'eel'\], and test/ \['cat', 'dog'\]",
    "empty class": "train/eel holds no image",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_malformed_image_folder(tmp_path, damage):
    write_tree(tmp_path)
    DAMAGES[damage](tmp_path, tmp_path / "train" / "cat" / "1.png")
    with pytest.raises(UsageError, match=rf"^--dataset [^\n]*{SAID[damage]}[^\n]*$"):
        data.load_data(str(tmp_path))


# ------------------------------------------------------------------------------------ Shakespeare


def windows_of_80(codes) -> tuple[list, list]:
    """x and y of a list of codes, by hand."""
    x, y = [], []
    begin = 0
    while begin + 80 < len(codes):
        x.append(codes[begin : begin + 80])
        y.append(codes[begin + 80])
        begin += 80
    return x, y


def test_shakespeare(tmp_path):
    rng = np.random.default_rng(0)
    letters = [*data.CHARACTERS.replace("\n", ""), "~"]  # ~ is none of the 80
    speech = {}
    for name, n in (("A", 1001), ("B", 500), ("C", 90)):
        speech[name] = "y" + "".join(rng.choice(letters, n)) + "x"
    blocks = [
        f"A:\n{speech['A'][:600]}",
        f"B:\n{speech['B']}",
        "no colon here",
        f"A:\n{speech['A'][600:]}",
        f"C:\n{speech['C']}",
    ]
    (tmp_path / "tinyshakespeare.txt").write_text("\n\n".join(blocks))
    found = data.load_data("shakespeare", str(tmp_path))

    code = {character: i for i, character in enumerate(data.CHARACTERS)}
    train_x, train_y, test_x, test_y, owner = [], [], [], [], []
    speech["A"] = speech["A"][:600] + "\n" + speech["A"][600:]
    for role, text in enumerate(speech.values()):
        codes = [code.get(character, code[" "]) for character in text]
        end = int(len(codes) * 0.8)
        x, y = windows_of_80(codes[:end])
        train_x += x
        train_y += y
        owner += [role] * len(x)
        x, y = windows_of_80(codes[end:])
        test_x += x
        test_y += y
    assert owner.count(1) == 5  # B's 401 training characters end with its fifth window's label
    assert len(data.CHARACTERS) == len(set(data.CHARACTERS)) == 80 == found.classes
    assert found.x_train.tolist() == train_x
    assert found.y_train.tolist() == train_y
    assert found.x_test.tolist() == test_x
    assert found.y_test.tolist() == test_y
    assert found.owner.tolist() == owner
    file = data.load_data("shakespeare", str(tmp_path / "tinyshakespeare.txt"))
    assert torch.equal(file.x_train, found.x_train)
    on_device = data.load_data("shakespeare", str(tmp_path), device="meta")
    assert on_device.x_train.is_meta
    assert on_device.y_test.is_meta


@pytest.mark.parametrize("name", ["short.txt", "gone"])
def test_a_text_without_speeches(name, tmp_path):
    (tmp_path / "short.txt").write_text("A:\nhello\n\nB:\nworld")
    with pytest.raises(UsageError, match=f"{name}[^\n]*$") as error:
        data.load_data("shakespeare", str(tmp_path / name))
    assert "tinyshakespeare.txt" in str(error.value)


def test_tiny_shakespeare(real_data):
    text = data.load_data("shakespeare", str(real_data))
    first = "".join(data.CHARACTERS[i] for i in text.x_train[0].tolist())
    assert first.startswith("Before we proceed any further, hear me speak.")
    assert text.x_train.shape[1] == 80
    assert len(text.owner) == len(text.y_train)
    assert len(np.unique(text.owner)) > 50


# ------------------------------------------------------------------------- torchvision's data sets


def fake(n, classes, is_online=True):
    """A torchvision data set to be downloaded: n training images, half as many for testing."""

    def make(root, train, download=False, **options):
        if not download:
            raise RuntimeError("Dataset not found")
        if not is_online:
            raise OSError("<urlopen error>\nno network")
        size = n if train else n // 2
        first = 1 if options == {"split": "letters"} else 0  # EMNIST's letters count from 1
        images = torch.full((size, 28, 28), 9, dtype=torch.uint8)
        return SimpleNamespace(data=images, targets=torch.arange(size) % classes + first)

    return make


@pytest.mark.parametrize("name, split", [("emnist", "letters"), ("emnist-byclass", "byclass")])
def test_emnist(name, split, tmp_path, monkeypatch):
    make = fake(130, 26)

    def emnist(root, split, **options):
        splits.append(split)
        return make(root, split=split, **options)

    splits = []
    monkeypatch.setattr(datasets, "EMNIST", emnist)
    found = data.load_data(name, str(tmp_path))
    assert splits == [split, split]
    assert found.classes == 26
    assert found.x_train.shape == (130, 28, 28, 1)
    assert found.x_test.shape == (65, 28, 28, 1)
    assert found.y_train.tolist() == [i % 26 for i in range(130)]
    assert found.y_test.tolist() == [i % 26 for i in range(65)]


@pytest.mark.parametrize("name, kind", [("cifar10", "CIFAR10"), ("cifar100", "CIFAR100")])
def test_cifar_as_torchvision_holds_it(name, kind, tmp_path, monkeypatch):
    """A uint8 array and a list of labels."""

    def make(root, train, download):
        part = slice(0, 20) if train else slice(20, 30)
        return SimpleNamespace(data=SAMPLES[part], targets=LABELS[part].tolist())

    monkeypatch.setattr(datasets, kind, make)
    found = data.load_data(name, str(tmp_path))
    assert np.array_equal(found.x_train, SAMPLES[:20])
    assert np.array_equal(found.x_test, SAMPLES[20:])
    assert found.y_train.tolist() == LABELS[:20].tolist()
    assert found.y_test.tolist() == LABELS[20:].tolist()


def test_a_data_set_that_is_not_there_and_one_of_other_pixels(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets, "CIFAR10", fake(4, 2, is_online=False))
    with pytest.raises(
        UsageError, match="^--dataset cifar10: [^\n]*urlopen[^\n]*--data-dir[^\n]*$"
    ):
        data.load_data("cifar10", str(tmp_path))
    monkeypatch.setattr(datasets, "MNIST", fake(60, 10))
    with pytest.raises(UsageError, match="^--dataset mnist: [^\n]*checksum[^\n]*--data-dir[^\n]*$"):
        data.load_data("mnist", str(tmp_path))


class FakeCelebA:
    attr_names = ["Bald", "Smiling", ""]

    def __init__(self, root, split, target_type, transform, download):
        self.n = 6 if split == "train" else 4
        self.transform = transform
        self.attr = torch.zeros(self.n, 3, dtype=torch.int64)
        self.attr[:, 1] = torch.arange(self.n) % 2
        self.identity = torch.arange(self.n)[:, None] // 2 + 10

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        if i == self.n:
            raise IndexError
        return self.transform(make_face(i)), 0


def make_face(i: int) -> Image.Image:
    """It is darker at the top, and each is lighter than the one before."""
    rows = np.arange(218, dtype=np.uint8)[:, None, None]
    return Image.fromarray(np.tile(rows + 5 * i, (1, 178, 3)))


def test_celeba_has_owners_and_smiles(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets, "CelebA", FakeCelebA)
    faces = data.load_data("celeba", str(tmp_path))
    assert faces.x_train.shape == (6, 84, 84, 3)
    wanted = make_face(3).crop((0, 20, 178, 198)).resize((84, 84), Image.Resampling.BILINEAR)
    assert np.array_equal(faces.x_train[3], wanted)
    assert len(faces.x_test) == 4
    assert faces.y_train.tolist() == [0, 1, 0, 1, 0, 1]
    assert faces.y_test.tolist() == [0, 1, 0, 1]
    assert faces.owner.tolist() == [10, 10, 11, 11, 12, 12]


def test_mnist_against_its_own_bytes(real_data):
    mnist = data.load_data("mnist", str(real_data))
    raw = real_data / "MNIST" / "raw"
    splits = {"train": (mnist.x_train, mnist.y_train), "t10k": (mnist.x_test, mnist.y_test)}
    for split, (x, y) in splits.items():
        images = np.frombuffer((raw / f"{split}-images-idx3-ubyte").read_bytes()[16:], np.uint8)
        labels = np.frombuffer((raw / f"{split}-labels-idx1-ubyte").read_bytes()[8:], np.uint8)
        assert np.array_equal(x.numpy().ravel(), images)
        assert np.array_equal(y.numpy(), labels)
    assert mnist.mean.item() / 255 == pytest.approx(0.1307, abs=1e-4)
    assert mnist.std.item() / 255 == pytest.approx(0.3081, abs=1e-4)
    fashion = data.load_data("fmnist", str(real_data))
    assert len(fashion.y_train) == 60_000  # its checksum is known, too


@pytest.mark.parametrize(
    "name, place", [("train-images-idx3-ubyte", 20_000), ("t10k-labels-idx1-ubyte", 100)]
)
def test_a_flipped_bit_of_mnist_is_found(name, place, real_data, tmp_path):
    copy = tmp_path / "MNIST" / "raw"
    copy.mkdir(parents=True)
    for file in (real_data / "MNIST" / "raw").glob("*-ubyte"):
        (copy / file.name).symlink_to(file)
    content = bytearray((copy / name).read_bytes())
    content[place] ^= 1
    (copy / name).unlink()
    (copy / name).write_bytes(content)
    with pytest.raises(UsageError, match="^--dataset mnist: [^\n]*checksum"):
        data.load_data("mnist", str(tmp_path))


# ------------------------------------------------------------------------------------- partitions

KINDS = ("iid", "label-skew", "dirichlet", "dirichlet-client", "dirichlet-ext")


def deal(kind, labels, clients, alpha=1.0, seed=0, **more) -> list[np.ndarray]:
    return data.partition(kind, labels, clients, alpha, np.random.default_rng(seed), **more)


def count_labels(shards, labels) -> np.ndarray:
    """(clients, classes)"""
    classes = labels.max() + 1
    return np.array([np.bincount(labels[shard], minlength=classes) for shard in shards])


def holder_of(shards, n) -> np.ndarray:
    """Who holds each sample, (n,)."""
    holder = np.full(n, -1)
    for m, shard in enumerate(shards):
        holder[shard] = m
    return holder


def count_sizes(shards) -> np.ndarray:
    return np.array([len(shard) for shard in shards])


@pytest.mark.parametrize("seed", range(5))
def test_random_partitions(seed):
    """100 times: disjoint, covering, sorted, seeded; as many samples move as small clients lack."""
    rng = np.random.default_rng(seed)
    for _ in range(100):
        kind = KINDS[rng.integers(5)]
        n = int(rng.integers(1, 300))
        clients = int(rng.integers(1, min(n, 40) + 1))
        labels = rng.integers(0, rng.integers(1, 12), n)
        most = min(4, labels.max() + 1)
        low = int(rng.integers(0, n // clients + 1))
        case = {"kind": kind, "labels": labels, "clients": clients}
        case |= {"alpha": 10 ** rng.uniform(-3, 3), "seed": int(rng.integers(1000))}
        case |= {"classes_per_client": int(rng.integers(1, most + 1))}
        shards = deal(**case, min_size=low)
        again = deal(**case, min_size=low)
        free = deal(**case, min_size=0)
        assert len(shards) == clients, case
        assert np.array_equal(np.sort(np.concatenate(shards)), np.arange(n)), case
        for shard, same in zip(shards, again, strict=True):
            assert np.array_equal(shard, np.sort(shard)), case
            assert np.array_equal(shard, same), case
        sizes = count_sizes(shards)
        before = count_sizes(free)
        assert sizes.min() >= low, case
        moved = (holder_of(shards, n) != holder_of(free, n)).sum()
        assert moved == np.maximum(low - before, 0).sum(), case
        assert (sizes[before < low] == low).all(), case


@pytest.mark.parametrize("kind", KINDS)
def test_another_seed_gives_another_partition(kind):
    labels = np.arange(100) % 10
    first = holder_of(deal(kind, labels, 10, 0.5, seed=1), 100)
    second = holder_of(deal(kind, labels, 10, 0.5, seed=2), 100)
    assert not np.array_equal(first, second)


def test_the_poor_are_filled_from_the_largest_at_random():
    shards = deal("dirichlet", np.zeros(100, dtype=int), 5, 1e-3, min_size=8)
    assert sorted(count_sizes(shards)) == [8, 8, 8, 8, 68]
    given = np.sort(np.concatenate([shard for shard in shards if len(shard) == 8]))
    assert np.ptp(given) > 40  # not the largest client's first or last samples
    labels = np.repeat(np.arange(4), (50, 48, 1, 1))  # client m holds class m
    shards = deal("label-skew", labels, 4, min_size=11, classes_per_client=1)
    assert count_sizes(shards).tolist() == [39, 39, 11, 11]  # in turn from whoever has most


def test_iid_sizes_and_mixture():
    labels = np.arange(1003) % 10
    shards = deal("iid", labels, 10)
    assert set(count_sizes(shards)) == {100, 101}
    assert (count_labels(shards, labels) > 0).all()
    assert np.mean(np.diff(shards[0])) > 5  # not consecutive


@pytest.mark.parametrize("held", [1, 2, 4])
def test_label_skew_holders_and_equal_split(held):
    labels = np.random.default_rng(0).integers(0, 10, 4000)
    shards = deal("label-skew", labels, 25, seed=1, classes_per_client=held)
    counts = count_labels(shards, labels)
    assert ((counts > 0).sum(1) == held).all()
    assert all(counts[m, m % 10] > 0 for m in range(25))
    for c in range(10):
        parts = counts[counts[:, c] > 0, c]
        assert parts.max() - parts.min() <= 1
        assert parts.sum() == (labels == c).sum()


def test_label_skews_other_class_is_uniform():
    labels = np.arange(60_000) % 10
    counts = count_labels(deal("label-skew", labels, 3000, seed=1), labels)
    offsets = []
    for m, row in enumerate(counts):
        offsets += [(c - m) % 10 for c in np.flatnonzero(row) if c != m % 10]
    found = np.bincount(offsets, minlength=10)
    assert found[0] == 0
    assert len(offsets) == 3000
    deviation = math.sqrt(3000 / 9 * 8 / 9)
    assert np.abs(found[1:] - 3000 / 9).max() < 5 * deviation


def dirichlet_variance(m, alpha) -> float:
    """Of a share of Dir(alpha) over m holders, whose mean is 1 / m."""
    return (1 / m) * (1 - 1 / m) / (m * alpha + 1)


@pytest.mark.parametrize("kind", ["label-skew", "dirichlet-ext"])
def test_a_client_holds_no_more_classes_than_there_are(kind):
    labels = np.arange(40) % 4
    shards = deal(kind, labels, 5, classes_per_client=4)
    assert len(np.unique(labels[shards[0]])) <= 4
    with pytest.raises(UsageError, match="^--classes-per-client: choose at most .* 4 classes$"):
        deal(kind, labels, 5, classes_per_client=9)
    deal("iid", labels, 5, classes_per_client=9)  # which does not use it


def test_dirichlet_ext_shares_have_the_moments_of_the_distribution():
    """The holders are label-skew's of the same seed: 4 of them hold a class on average."""
    labels = np.repeat(np.arange(600), 200)
    options = {"min_size": 0, "classes_per_client": 4}
    shares = count_labels(deal("dirichlet-ext", labels, 600, 0.5, **options), labels) / 200
    held = count_labels(deal("label-skew", labels, 600, 0.5, **options), labels) > 0
    assert (held.sum(1) == 4).all()
    assert np.allclose(shares.sum(0), 1)
    assert not shares[~held].any()
    of_four = held.sum(0) == 4
    shares = shares[:, of_four][held[:, of_four]]
    assert len(shares) > 300
    deviation = (shares - 1 / 4) ** 2
    assert deviation.mean() == pytest.approx(dirichlet_variance(4, 0.5), rel=0.12)


@pytest.mark.parametrize("clients", [5, 2000])
@pytest.mark.parametrize("kind", ["dirichlet", "dirichlet-client", "dirichlet-ext"])
def test_the_smallest_alpha(kind, clients):
    """No NaN, whatever the length of the vector of shares."""
    labels = np.repeat(np.arange(10), 400)
    counts = count_labels(deal(kind, labels, clients, 1e-3, min_size=0), labels)
    assert (counts.sum(0) == 400).all()
    if kind == "dirichlet" and clients == 5:
        assert np.median(counts.max(0)) == 400  # a class lies with one client
    if kind == "dirichlet-client":
        assert set(counts.sum(1)) == {4000 // clients}


def test_dirichlet_client_has_equal_sizes_and_follows_alpha():
    labels = np.repeat(np.arange(10), 200)

    def distance_from_uniform(alpha):
        shards = deal("dirichlet-client", labels, 20, alpha)
        assert set(count_sizes(shards)) == {100}
        shares = count_labels(shards, labels) / 100
        return np.abs(shares - 0.1).sum(1).mean() / 2

    assert distance_from_uniform(0.01) > 0.7
    assert 0.2 < distance_from_uniform(0.5) < 0.7
    assert distance_from_uniform(1e3) < 0.2


class Rigged(np.random.Generator):
    """Nine clients want classes as they are; one wants a class that there is not."""

    def dirichlet(self, alpha, size):
        return np.array([[0.0, 1.0, 0.0]] + [[0.75, 0.0, 0.25]] * 9)


def test_a_client_whose_classes_are_used_up_takes_what_is_left():
    labels = np.repeat((0, 2), (3000, 1000))
    rng = Rigged(np.random.PCG64(0))
    shards = data.partition("dirichlet-client", labels, 10, 1.0, rng)
    assert (labels[shards[0]] == 2).mean() == pytest.approx(0.25, abs=0.07)


def test_the_smallest_shares_are_dealt():
    """Where all that a client wants weighs less than a float's smallest normal number."""

    class Tiny(np.random.Generator):
        def dirichlet(self, alpha, size):
            return np.tile([0.0, 5e-324, 0.0], (size, 1))

        def random(self):
            return 0.75

    labels = np.repeat(np.arange(3), 10)
    shards = data.partition("dirichlet-client", labels, 3, 1e-3, Tiny(np.random.PCG64(0)))
    assert (count_labels(shards, labels).sum(0) == 10).all()


class Scripted(np.random.Generator):
    """Random numbers in which the clients' class fractions are these, one array a call."""

    def script(self, *tables):
        self.tables = list(tables)
        return self

    def dirichlet(self, alpha, size):
        self.alpha = alpha
        return np.array(self.tables.pop(0), dtype=float)


def test_dirichlet_even_divides_a_class_in_proportion_to_what_clients_want_of_it():
    """A class without samples counts nowhere, and the poor or unwanted are drawn again."""
    labels = np.repeat((0, 2, 3), (300, 100, 40))
    poor = [[0.99, 0.0, 0.01], [0.01, 0.99, 0.0], [0.0, 0.01, 0.99], [0.0, 0.01, 0.0]]
    unwanted = [[0.5, 0.5, 0.0]] * 4
    fair = [[0.6, 0.1, 0.3], [0.1, 0.9, 0.0], [0.5, 0.25, 0.25], [0.05, 0.9, 0.05]]
    rng = Scripted(np.random.PCG64(0)).script(poor, unwanted, fair)
    shards = data.partition("dirichlet-even", labels, 4, 0.4, rng)
    assert not rng.tables
    assert rng.alpha == pytest.approx(0.4 * 3 * np.array([300, 100, 40]) / 440)
    assert np.array_equal(np.sort(np.concatenate(shards)), np.arange(440))
    counts = count_labels(shards, labels)[:, [0, 2, 3]]
    for m in range(4):
        for c, n in enumerate((300, 100, 40)):
            wanted = n * fair[m][c] / sum(fair[i][c] for i in range(4))
            assert abs(counts[m, c] - wanted) <= 1


@pytest.mark.parametrize(
    ("alpha", "wanted"),
    [
        (0.05, (369, 484, 678, 360, 790)),
        (0.2, (429, 498, 584, 408, 631)),
        (0.9, (476, 500, 525, 464, 537)),
    ],
)
def test_dirichlet_even_has_the_sizes_of_the_authors_code(alpha, wanted):
    """5 %, median, 95 %, least and largest of 100 clients: means over seeds."""
    labels = np.arange(50_000) % 10
    found = []
    for seed in range(40):
        sizes = count_sizes(deal("dirichlet-even", labels, 100, alpha, seed))
        found.append([*np.percentile(sizes, (5, 50, 95)), sizes.min(), sizes.max()])
    assert np.mean(found, axis=0) == pytest.approx(wanted, rel=0.05)


def test_dirichlet_even_gives_up_in_one_line():
    with pytest.raises(UsageError, match=r"^[^\n]*10 samples[^\n]*$"):
        deal("dirichlet-even", np.arange(100) % 10, 20, 0.05)


def test_natural_clients_are_whole():
    owner = np.repeat(np.arange(12) * 7, np.arange(1, 13))
    shards = deal("natural", owner * 0, 5, min_size=4, owner=owner)
    names = [np.unique(owner[shard]) for shard in shards]
    assert [len(name) for name in names] == [1] * 5
    assert len({int(name[0]) for name in names}) == 5
    for shard, name in zip(shards, names, strict=True):
        assert len(shard) == (owner == name).sum() >= 4
    other = deal("natural", owner * 0, 5, seed=1, min_size=4, owner=owner)
    assert {len(shard) for shard in other} != {len(shard) for shard in shards}
    every = deal("natural", owner * 0, 11, owner=owner)
    assert count_sizes(every).tolist() == list(range(2, 13))
    with pytest.raises(UsageError, match="only 11"):  # of the 12, one has a single sample
        deal("natural", owner * 0, 12, owner=owner)


@pytest.mark.parametrize(
    "kind, clients, low, owner, message",
    [
        ("IID", 5, 1, None, "IID: choose one of iid, "),
        ("iid", 11, 1, None, "11 clients or parts"),
        ("iid", 5, 3, None, "5 clients or parts"),
        ("natural", 5, 1, None, "natural"),
        ("natural", 5, 1, np.arange(10) // 5, "only 2"),
    ],
)
def test_partition_errors(kind, clients, low, owner, message):
    with pytest.raises(UsageError, match=message):
        deal(kind, np.zeros(10, int), clients, min_size=low, owner=owner)


def test_of_a_folder_only_train_and_test_are_looked_at(tmp_path, monkeypatch):
    """It may be a whole disk, or, as an empty word, the working directory."""
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    seen = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: seen.append(str(path)) or scandir(path))
    for name in (str(tmp_path), ""):
        with pytest.raises(UsageError, match="^--dataset "):
            data.load_data(name)
    assert not [path for path in seen if path.endswith("other")]


def test_first_line_of_an_error():
    assert data.first_line(ValueError("one\ntwo")) == "one"
    assert data.first_line(ValueError()) == "ValueError"
    assert data.first_line(ValueError("x" * 1000)) == "x" * 300
