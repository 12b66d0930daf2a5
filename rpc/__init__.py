"""What makes a process a good gRPC citizen: addresses, settings, logs, health, channels, servers, errors.

It knows nothing of LLMs and no contract: nothing here would change if the services did something else.
"""
