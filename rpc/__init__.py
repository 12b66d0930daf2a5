"""How a process of ours is a good gRPC citizen: addresses, settings, logs, health, channels, servers, errors.

It knows no LLM word and no contract: nothing here would change if the services spoke of something else.
"""
