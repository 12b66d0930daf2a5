// What every call to the router needs: the key that goes with it, why it was refused, the events of its stream.

export function headers() {
  const key = document.getElementById("key").value.trim();
  return key ? { authorization: `Bearer ${key}` } : {};
}

export async function reason(response) {
  try { return (await response.json()).error.message; } catch { return `HTTP ${response.status}`; }
}

// The data of each server-sent event.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let text = ""; ;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    const parts = text.split("\n\n");
    text = parts.pop();
    for (const part of parts) yield part.replace(/^data: /, "");
  }
}
