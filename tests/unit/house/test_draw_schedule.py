"""scripts/draw_schedule.py: text, SVG, PNG."""

from pathlib import Path

import pytest

from scripts.draw_schedule import Options, main, simulated, text
from tests.helpers.table import for_each

pytestmark = pytest.mark.second


def test_a_schedule_as_text() -> None:
    options = Options("1f1b", 2, 2)
    assert text(options, simulated(options)).splitlines() == [
        "1f1b: 2 ranks, 2 micro-batches; bubble 50.0% of the busiest rank's computing time",
        "  0 |F0- F1- ........B0----- ....B1----- |",
        "  1 |....F0- B0----- F1- B1----- ........|",
    ]


@for_each(("name", "begins"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml")])
def test_pictures(tmp_path: Path, name: str, begins: bytes) -> None:
    main(Options("interleaved", 2, 3, 2, tmp_path / "new" / name))
    assert (tmp_path / "new" / name).read_bytes().startswith(begins)


@for_each(
    ("options", "message"),
    [
        (Options("nothing"), "--schedule nothing: .* gpipe"),
        (Options(stages=0), "--stages 0: must be at least 1"),
        (Options(virtual=2), "--virtual 2: --schedule 1f1b has no virtual stages"),
        (Options(output=Path("a.bmp")), "--output a.bmp: must end in .png or .svg"),
    ],
)
def test_what_cannot_be_drawn_is_refused(options: Options, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        main(options)
