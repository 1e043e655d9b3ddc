"""Draws the figures of README and docs, as SVG, light and dark: `python docs/site/draw.py` writes docs/figures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path

FIGURES = Path(__file__).parents[1] / "figures"
FONT = "font-family='system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif'"
MONO = "font-family='ui-monospace, SFMono-Regular, Menlo, Consolas, monospace'"
THEMES = {
    "light": {"ink": "#1f2328", "faint": "#59636e", "line": "#818b98", "plain": "#f6f8fa", "ours": "#ddf4ff"},
    "dark": {"ink": "#f0f6fc", "faint": "#9198a1", "line": "#656c76", "plain": "#151b23", "ours": "#0c2d6b"},
}
LINE = 18  # height of a line of text


@dataclass(frozen=True)
class Box:
    """Describes a box with a title and lines below it; in ``code`` they keep their spaces."""

    x: int
    y: int
    width: int
    height: int
    title: str
    lines: tuple[str, ...] = ()
    fill: str = "plain"
    code: bool = False

    def svg(self, theme: dict[str, str]) -> Iterator[str]:
        frame = f"x='{self.x}' y='{self.y}' width='{self.width}' height='{self.height}' rx='8'"
        yield f"<rect {frame} fill='{theme[self.fill]}' stroke='{theme['line']}'/>"
        middle, top = self.x + self.width // 2, self.y + 24
        yield text(middle, top, self.title, theme["ink"], bold=True)
        for number, line in enumerate(self.lines, 1):
            left = self.x + 14 if self.code else middle
            yield text(left, top + number * LINE, line, theme["faint"], code=self.code)


@dataclass(frozen=True)
class Arrow:
    """Describes an arrow from one point to another, with a word beside its middle."""

    start: tuple[int, int]
    end: tuple[int, int]
    word: str = ""

    def svg(self, theme: dict[str, str]) -> Iterator[str]:
        (x, y), (u, v) = self.start, self.end
        yield f"<path d='M{x} {y} L{u} {v}' stroke='{theme['line']}' stroke-width='2' marker-end='url(#head)'/>"
        if self.word:
            yield text((x + u) // 2 + 4, (y + v) // 2 - 8, self.word, theme["faint"])


def text(x: int, y: int, words: str, colour: str, *, bold: bool = False, code: bool = False) -> str:
    """Returns one line of text, centred at ``x``, or beginning there in ``code``."""
    form = f"{MONO} font-size='12' xml:space='preserve'" if code else f"{FONT} font-size='13' text-anchor='middle'"
    weight = " font-weight='600'" if bold else ""
    return f"<text x='{x}' y='{y}' fill='{colour}' {form}{weight}>{escape(words)}</text>"


def svg(size: tuple[int, int], parts: tuple[Box | Arrow, ...], theme: dict[str, str], title: str) -> str:
    """Returns a figure."""
    width, height = size
    head = (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='{height}' "
        f"viewBox='0 0 {width} {height}' role='img'><title>{escape(title)}</title>"
        "<defs><marker id='head' viewBox='0 0 10 10' refX='9' refY='5' markerWidth='6' markerHeight='6' "
        f"orient='auto'><path d='M0 0 L10 5 L0 10 z' fill='{theme['line']}'/></marker></defs>"
    )
    return "\n".join([head, *(line for part in parts for line in part.svg(theme)), "</svg>", ""])


OVERVIEW = (
    Box(0, 0, 220, 100, "Hugging Face model", ("config.json, safetensors,", "the stock class: unmodified")),
    Box(
        *(0, 124, 220, 116, "schedule"),
        ('mlp["up_proj"].shard(', '    "weight", axis=0)', 'mlp["down_proj"].shard(', '    "weight", axis=1)'),
        fill="ours",
        code=True,
    ),
    Box(
        *(300, 40, 220, 160, "megasched"),
        (
            *("follows one forward on meta,", "derives what is communicated,", "cuts weights and stages,"),
            *("puts in Megatron's layers,", "refuses what is not proven"),
        ),
        fill="ours",
    ),
    Box(
        *(600, 40, 220, 160, "Megatron-LM's trainer"),
        (
            *("TP · SP · PP · VPP · CP · EP · DP", "distributed optimizer, bf16, fp8"),
            *("your flags, your data,", "your pretrain_gpt.py:", "unmodified"),
        ),
    ),
    Arrow((220, 70), (298, 100)),
    Arrow((220, 170), (298, 140)),
    Arrow((520, 120), (598, 120)),
    Box(600, 236, 220, 60, "HF folder again", ("bit by bit",)),
    Arrow((710, 200), (710, 234)),
    Box(300, 236, 220, 60, "verify", ("loss and every gradient = HF's",), fill="ours"),
    Arrow((410, 200), (410, 234)),
)

TP_TYPES = (
    Box(0, 60, 130, 76, "x", ("[s, b, h]", "REPLICATE")),
    Box(190, 0, 190, 92, "up_proj, rank 0", ("column: rows 0 to f/2", "shard(axis=0)"), fill="ours"),
    Box(190, 108, 190, 92, "up_proj, rank 1", ("column: rows f/2 to f", "shard(axis=0)"), fill="ours"),
    Box(440, 0, 190, 92, "down_proj, rank 0", ("takes its own features:", "FEATURE_SHARD"), fill="ours"),
    Box(440, 108, 190, 92, "down_proj, rank 1", ("takes its own features:", "FEATURE_SHARD"), fill="ours"),
    Box(700, 60, 120, 76, "all-reduce", ("y [s, b, h]", "REPLICATE")),
    Arrow((130, 90), (188, 50)),
    Arrow((130, 106), (188, 150)),
    Arrow((380, 46), (438, 46)),
    Arrow((380, 154), (438, 154)),
    Arrow((630, 50), (698, 90)),
    Arrow((630, 150), (698, 106)),
)

STAGES = (
    Box(
        0,
        20,
        180,
        220,
        "the HF model",
        ("embed_tokens", "layers.0", "layers.1", "layers.2", "layers.3", "norm, lm_head"),
    ),
    Box(
        260,
        0,
        250,
        118,
        "pipeline rank 0",
        ("embed_tokens, layers.0, layers.1", "layers.2 and 3: hollow", "norm, lm_head: hollow"),
        fill="ours",
    ),
    Box(
        260,
        142,
        250,
        118,
        "pipeline rank 1",
        ("embed_tokens: hollow", "layers.0 and 1: hollow", "layers.2, layers.3, norm, lm_head"),
        fill="ours",
    ),
    Box(590, 84, 230, 92, "Megatron's schedule", ("sends [s, b, h] between ranks,", "1F1B or interleaved")),
    Arrow((180, 110), (258, 60)),
    Arrow((180, 150), (258, 200)),
    Arrow((510, 60), (588, 110)),
    Arrow((510, 200), (588, 150)),
)

FIGURES_DRAWN = {
    "overview": (
        (821, 298),
        OVERVIEW,
        "A Hugging Face model and a schedule go into megasched, and Megatron-LM's trainer runs them",
    ),
    "tp-types": (
        (821, 202),
        TP_TYPES,
        "A column-parallel and a row-parallel linear on two ranks, and how tensors lie between them",
    ),
    "stages": (
        (821, 262),
        STAGES,
        "Each pipeline rank has the whole definition, with the modules of other stages hollow",
    ),
}


def draw() -> dict[str, str]:
    """Returns every figure by the name of its file."""
    return {
        f"{name}-{theme}.svg": svg(size, parts, colours, title)
        for name, (size, parts, title) in FIGURES_DRAWN.items()
        for theme, colours in THEMES.items()
    }


if __name__ == "__main__":
    FIGURES.mkdir(exist_ok=True)
    for file, drawn in draw().items():
        (FIGURES / file).write_text(drawn)
