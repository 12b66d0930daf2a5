// A Chairlift client in Node, in one page: npm install && node client.mjs [ADDRESS] ["A question"]
//
// There are no generated stubs: the contract is read from protos/v1 when the program starts.
import { fileURLToPath } from "node:url";
import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";

const [address = "127.0.0.1:50051", question = "What is the capital of France?"] = process.argv.slice(2);

const root = fileURLToPath(new URL("../..", import.meta.url)); // where protos/ is
const definition = protoLoader.loadSync("protos/v1/router.proto", {
  includeDirs: [root],
  keepCase: true, // names as the contract writes them
  longs: String, // seeds have 64 bits, numbers of JavaScript 53 (and `logit_bias` of an answer has the bytes of ids for keys)
  enums: String,
  defaults: true, // an empty text is "", not undefined
  oneofs: true,
});
const { Router } = grpc.loadPackageDefinition(definition).chairlift.v1;
const router = new Router(address, grpc.credentials.createInsecure(), { "grpc.default_authority": "localhost" });

const request = {
  chat: { messages: [{ role: "user", content: question }] },
  sampling: { max_tokens: 48, temperature: 0 },
};
const deadline = () => new Date(Date.now() + 60_000); // of the call, and so of the request

// As it comes. `call.cancel()` would give the request up, and free what it holds on the server.
const call = router.Generate(request, { deadline: deadline() });
call.on("data", (event) => {
  switch (event.event) {
    case "accepted":
      console.log(`request ${event.accepted.request_id}, seed ${event.accepted.seed}`);
      break;
    case "delta":
      process.stdout.write(event.delta.text);
      break;
    case "finished":
      console.log(`\n${event.finished.reason}, ${event.finished.usage.num_output_tokens} tokens`);
  }
});
await new Promise((resolve, reject) => call.on("end", resolve).on("error", reject));

// The same, whole.
const complete = (message) =>
  new Promise((resolve, reject) =>
    router.Complete(message, { deadline: deadline() }, (error, answer) => (error ? reject(error) : resolve(answer))),
  );
const answer = await complete(request);
console.log(`whole: ${answer.choices[0].text}`);

// A refusal names field, value and limit.
try {
  await complete({ ...request, sampling: { temperature: -1 } });
} catch (error) {
  console.log(`${grpc.status[error.code]}: ${error.details}`);
}
router.close();
