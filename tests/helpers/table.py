"""A table of cases as one test: an item that pytest collects costs more than most rows."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any


@contextlib.contextmanager
def _of_one_row(fixtures: dict[str, Any], number: int) -> Iterator[dict[str, Any]]:
    own = dict(fixtures)
    if "tmp_path" in own:
        own["tmp_path"] = own["tmp_path"] / f"row{number}"
        own["tmp_path"].mkdir()
    if "monkeypatch" not in own:
        yield own
        return
    with own["monkeypatch"].context() as own["monkeypatch"]:
        yield own


def for_each(names: str | tuple[str, ...], rows: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test once for each row, as `pytest.mark.parametrize` does, but as one item.

    Every row runs; errors name theirs. A row has a folder `tmp_path` and a `monkeypatch` of its own, and shares the
    other fixtures of the test. Decorators can be stacked.

    Args:
        names: parameters of the test, which rows have values for.
        rows: a value each, or as many as `names` has.
    """
    names = tuple(names.replace(",", " ").split()) if isinstance(names, str) else names
    rows = list(rows)
    assert not any(hasattr(row, "marks") for row in rows), "a row with marks is an item of its own"
    cases = [dict(zip(names, row if len(names) > 1 else (row,), strict=True)) for row in rows]
    assert cases, "a table without rows tests nothing"

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            errors: list[Exception] = []
            for number, case in enumerate(cases):
                try:
                    with _of_one_row(fixtures, number) as own:
                        test(**own, **case)
                except Exception as error:
                    error.add_note(f"row: {', '.join(f'{name}={value!r}' for name, value in case.items())}")
                    errors.append(error)
            if len(errors) == 1:
                raise errors[0]
            if errors:
                raise ExceptionGroup(f"{len(errors)} of {len(cases)} rows fail", errors)

        signature = inspect.signature(test)
        others = [parameter for name, parameter in signature.parameters.items() if name not in names]
        run.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        return run

    return decorate
