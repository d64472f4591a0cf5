"""Topics: named streams of keyed messages, each with one policy. `Topic` blocks, `AioTopic` awaits."""
