import pytest

from motley.cli.typed.durations import seconds


@pytest.mark.parametrize(("text", "told"), [("90s", 90), ("30m", 1800), ("1.5h", 5400), ("2 H", 7200), ("0s", 0)])
def test_durations(text: str, told: float) -> None:
    assert seconds(text) == told


@pytest.mark.parametrize("text", ["", "2", "-1h", "1d", "1e3s", "nanh", "h", "1h30m", "9999999999h"])
def test_what_is_none_is_told_how_to_write_it(text: str) -> None:
    with pytest.raises(ValueError, match=r"write 90s, 30m or 1\.5h"):
        seconds(text)
