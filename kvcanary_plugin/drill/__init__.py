"""A real engine server on tiny models, traffic for it, and its metrics: the drill's tools."""
