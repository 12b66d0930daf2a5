// OpenAI's own client for Node at Chairlift's HTTP door: npm install && node openai.mjs [URL] ["A question"]
import OpenAI from "openai";

const [url = "http://127.0.0.1:8000", question = "What is the capital of France?"] = process.argv.slice(2);
const baseURL = `${url.replace(/\/+(v1\/*)?$/, "")}/v1`; // with or without /v1, as people have it
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const model = (await client.models.list()).data[0].id;
const messages = [{ role: "user", content: question }];

// As it comes, with the usage at the end.
const stream = await client.chat.completions.create({
  model,
  messages,
  max_tokens: 48,
  temperature: 0,
  stream: true,
  stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  process.stdout.write(chunk.choices[0]?.delta?.content ?? "");
  if (chunk.usage) console.log(`\n${chunk.usage.completion_tokens} tokens`);
}

// Whole.
const whole = await client.chat.completions.create({ model, messages, max_tokens: 48, temperature: 0 });
console.log(`whole: ${whole.choices[0].message.content}`);

// Held to a JSON schema: whatever the model thinks, the answer parses.
const schema = { type: "object", properties: { sure: { type: "boolean" } }, required: ["sure"], additionalProperties: false };
const held = await client.chat.completions.create({
  model,
  messages,
  max_tokens: 200,
  temperature: 0,
  response_format: { type: "json_schema", json_schema: { name: "verdict", schema } },
});
console.log(`held: ${typeof JSON.parse(held.choices[0].message.content).sure}`);

// What is refused says which field, value and limit.
try {
  await client.chat.completions.create({ model, messages, temperature: -1 });
} catch (error) {
  console.log(`${error.constructor.name} ${error.status} ${error.param}: ${error.message}`);
}
