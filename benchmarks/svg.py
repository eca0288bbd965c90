"""Pictures of the documentation: a plot of given axes, written as SVG, the same on any machine."""

from dataclasses import dataclass, field

INK, GREY, PALE = "#1f2430", "#6b7280", "#e5e7eb"
WIDTH, HEIGHT = 600, 400
LEFT, RIGHT, TOP, BOTTOM = 44, 20, 84, 56  # the margins of the axes


@dataclass
class Plot:
    """A plot whose axes show the ranges `x` and `y`."""

    about: str
    note: str
    x: tuple[float, float]
    y: tuple[float, float]
    parts: list[str] = field(default_factory=list)
    right: int = RIGHT

    def __post_init__(self):
        self.text(12, 28, self.about, size=16)
        self.text(12, 50, self.note, fill=GREY)

    def across(self, value: float) -> float:
        low, high = self.x
        return LEFT + (value - low) / (high - low) * (WIDTH - LEFT - self.right)

    def down(self, value: float) -> float:
        low, high = self.y
        return HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    def at(self, x: float, y: float) -> tuple[float, float]:
        return self.across(x), self.down(y)

    def axes(self, x: dict[float, str], y: dict[float, str], names: tuple[str, str]) -> None:
        """Ticks by value, and what the axes are."""
        for value, told in y.items():
            height = self.down(value)
            self.line(LEFT, height, WIDTH - self.right, height, PALE)
            self.text(LEFT - 8, height + 4, told, "end", GREY)
        for value, told in x.items():
            self.text(self.across(value), HEIGHT - BOTTOM + 20, told, "middle", GREY)
        floor = self.down(self.y[0])
        self.line(LEFT, floor, WIDTH - self.right, floor, GREY)
        middle = (LEFT + WIDTH - self.right) / 2
        self.text(middle, HEIGHT - 12, names[0], "middle", GREY)
        self.text(LEFT - 12, self.down(max(y)) - 12, names[1], "middle", GREY)

    def mark(self, x: float, y: float, color: str, spread: float | None, r: float = 5) -> None:
        """A point with the bar of its spread; hollow where it has none."""
        right = self.across(x)
        if spread is not None:
            self.line(right, self.down(y - spread), right, self.down(y + spread), color, 1.5)
        fill = color if spread is not None else "#ffffff"
        self.parts.append(
            f'<circle cx="{right:.1f}" cy="{self.down(y):.1f}" r="{r:g}" fill="{fill}" '
            f'stroke="{color}" stroke-width="1.5"/>'
        )

    def line(
        self,
        x1: float,
        y1: float,
        x2: float,
        y2: float,
        color: str,
        width: float = 1,
        dashes: str = "",
    ) -> None:
        dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
        self.parts.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" '
            f'stroke="{color}" stroke-width="{width}"{dashed}/>'
        )

    def text(
        self,
        right: float,
        down: float,
        words: str,
        anchor: str = "start",
        fill: str = INK,
        size: int = 14,
        halo: bool = False,
    ) -> None:
        """Words; with a halo, what lies below does not cross them."""
        around = ' paint-order="stroke" stroke="#ffffff" stroke-width="5"' if halo else ""
        self.parts.append(
            f'<text x="{right:.1f}" y="{down:.1f}" text-anchor="{anchor}" fill="{fill}" '
            f'font-size="{size}"{around}>{words}</text>'
        )

    def svg(self) -> str:
        head = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
            f'width="{WIDTH}" height="{HEIGHT}" role="img" font-family="sans-serif" '
            'font-size="14">',
            f"<title>{self.about}</title>",
            f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="#ffffff"/>',
        ]
        return "\n".join([*head, *self.parts, "</svg>"]) + "\n"
