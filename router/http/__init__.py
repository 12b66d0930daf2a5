"""The HTTP door: answers what OpenAI's tools send, as they expect it. It leads where gRPC's door leads."""
