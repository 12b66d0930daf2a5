"""The HTTP door: what OpenAI's tools send, answered as they expect it. It leads where gRPC's door leads."""
