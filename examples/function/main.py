"""Says how late each flight is, in words. Runs as it is on Headrace and on Nuclio."""

import json


def init_context(context):
    """Prepare once per worker."""
    context.user_data.limits = [(60, "very late"), (15, "late"), (0, "a little late")]


def handler(context, event):
    """Return the flight with a word for its delay."""
    flight = event.body if isinstance(event.body, dict) else json.loads(event.body)
    delay = flight["arr_delay"]
    if delay is None:
        context.logger.info_with("flight was cancelled", flight=event.id)
        return None
    word = next((word for limit, word in context.user_data.limits if delay > limit), "on time")
    return context.Response(headers={"carrier": flight["carrier"]}, body={**flight, "arrival": word})
