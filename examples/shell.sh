#!/bin/sh
# A chat from the shell, streamed: examples/shell.sh [URL] ["A question"]
# The server needs its HTTP door: chairlift serve --model smollm2 --http 127.0.0.1:8000
curl --no-buffer --silent --show-error --fail-with-body "${1:-http://127.0.0.1:8000}/v1/chat/completions" \
    -H 'content-type: application/json' -d \
    "{\"messages\": [{\"role\": \"user\", \"content\": \"${2:-What is the capital of France?}\"}], \"max_tokens\": 32, \"stream\": true}"
