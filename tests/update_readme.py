"""Writes the registry's table into the README; run it after a change of the fields."""

from pathlib import Path

from lmbench.records.schema import field_table

path = Path(__file__).parents[1] / "README.md"
before, rest = path.read_text().split("<!-- fields -->")
after = rest.split("<!-- /fields -->")[1]
path.write_text(f"{before}<!-- fields -->\n\n{field_table().strip()}\n\n<!-- /fields -->{after}")
