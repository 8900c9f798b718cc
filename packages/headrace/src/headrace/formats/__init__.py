"""From JSON text to stored bytes and back: codecs, the wire format's framing, the schema registry."""
