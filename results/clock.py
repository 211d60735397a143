"""What a method costs in time, on devices of several spreads at once, for the studies clock.py.

Training does not depend on how fast the devices are. So one run serves all spreads.
"""

SPREADS = (0.5, 1.5)  # standard deviations of log slowness and log bandwidth


class Timed:
    """Adds the columns clock_0.5, waiting_0.5 .. of every round to a Federation's cost."""

    def cost(self, update, *numbers, **named) -> dict[str, float]:
        alike = self.devices
        columns = super().cost(update, *numbers, **named)
        for spread in SPREADS:
            self.devices = self.draw_devices(spread)
            cost = super().cost(update, *numbers, **named)
            columns[f"clock_{spread}"] = cost["clock"]
            columns[f"waiting_{spread}"] = cost["waiting"]
        self.devices = alike
        return columns
