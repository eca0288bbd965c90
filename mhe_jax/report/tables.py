"""Tables of numbers, as Markdown, CSV and HTML: one source, three forms.

A cell is a text, a number, or None if it is empty. CSV has numbers in full; the other two round
them as their column says.
"""

import csv
import dataclasses
import html
import io
import statistics
from collections.abc import Sequence
from typing import Any

Cell = str | float | int | None
NONE = "-"


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float | None]:
    """Of one or more numbers: their mean, and the sample's standard deviation; None of one.

    >>> mean_and_deviation([1.0, 2.0, 3.0]), mean_and_deviation([5.0])
    ((2.0, 1.0), (5.0, None))
    """
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None


@dataclasses.dataclass(frozen=True)
class Column:
    """`digits` after the point; None is a column of text."""

    title: str
    digits: int | None = None

    def shown(self, cell: Cell) -> str:
        """
        >>> Column("loss", 2).shown(1234.567), Column("loss", 2).shown(None)
        ('1,234.57', '-')
        """
        if cell is None:
            return NONE
        if isinstance(cell, str) or self.digits is None:
            return str(cell)
        return f"{cell:,.{self.digits}f}"


@dataclasses.dataclass(frozen=True)
class Table:
    """A table; `name` is that of its CSV file, `notes` stand below it."""

    name: str
    title: str
    columns: list[Column]
    rows: list[list[Any]]
    notes: list[str] = dataclasses.field(default_factory=list)

    def without_empty_columns(self) -> "Table":
        """The table without the columns, after the first, in which no row has anything."""
        kept = [
            i
            for i in range(len(self.columns))
            if i == 0 or any(row[i] is not None for row in self.rows)
        ]
        return dataclasses.replace(
            self,
            columns=[self.columns[i] for i in kept],
            rows=[[row[i] for i in kept] for row in self.rows],
        )

    def markdown(self) -> str:
        titles = [column.title for column in self.columns]
        lines = [f"### {self.title}", "", f"| {' | '.join(titles)} |"]
        lines.append(
            "|" + "|".join("---" if c.digits is None else "---:" for c in self.columns) + "|"
        )
        for row in self.rows:
            cells = [
                " ".join(column.shown(cell).replace("|", "\\|").split())
                for column, cell in zip(self.columns, row, strict=True)
            ]
            lines.append(f"| {' | '.join(cells)} |")
        return "\n".join([*lines, *(f"\n{note}" for note in self.notes)])

    def csv(self) -> str:
        buffer = io.StringIO()
        writer = csv.writer(buffer, lineterminator="\n")
        writer.writerow([column.title for column in self.columns])
        writer.writerows([["" if cell is None else cell for cell in row] for row in self.rows])
        return buffer.getvalue()

    def html(self) -> str:
        """Numbers carry their full value for sorting."""
        head = "".join(
            f'<th scope="col"{"" if column.digits is None else " class=number"}>'
            f"<button>{html.escape(column.title)}</button></th>"
            for column in self.columns
        )
        body = []
        for row in self.rows:
            cells = []
            for column, cell in zip(self.columns, row, strict=True):
                number = isinstance(cell, (int, float))
                value = f' data-value="{cell!r}"' if number else ""
                kind = "" if column.digits is None else " class=number"
                cells.append(f"<td{kind}{value}>{html.escape(column.shown(cell))}</td>")
            body.append(f"<tr>{''.join(cells)}</tr>")
        notes = "".join(f"<p class=note>{html.escape(note)}</p>" for note in self.notes)
        return (
            f"<h3>{html.escape(self.title)}</h3>\n"
            f"<div class=scroll><table><thead><tr>{head}</tr></thead>\n"
            f"<tbody>\n{chr(10).join(body)}\n</tbody></table></div>\n{notes}"
        )
