// An executor of docs/protocol.md in one page: npm install && node executor.mjs [ADDRESS]
//
// Its "model" is a hash of the whole context. `chairlift conformance ADDRESS` finds nothing to complain of.
import { createHash, randomBytes } from "node:crypto";
import { fileURLToPath } from "node:url";
import { isDeepStrictEqual } from "node:util";
import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";
import { HealthImplementation } from "grpc-health-check";

const CAPACITY = { protocol_revision: 1, num_blocks: 512, block_size: 4, max_num_seqs: 8, max_num_batched_tokens: 64, max_seq_len: 128,
  max_window: 2, vocab_size: 97, eos_token_ids: [0], row_invariant: true, dtype: "none", device: "toy", instance_id: randomBytes(8).toString("hex") };
const { ABORTED, DATA_LOSS, FAILED_PRECONDITION, PERMISSION_DENIED } = grpc.status;
let holder = "", term = 0, epoch = null, live = null; // live: the newest stream that brought a plan
const past = new Map(); // whose each earlier epoch was

function demand(holds, sentence) { if (!holds) throw new Error(sentence); }
const sum = (numbers) => numbers.reduce((total, number) => total + number, 0);

function refusal(code) {
  const metadata = new grpc.Metadata();
  if (code === PERMISSION_DENIED) { metadata.set("chairlift-scheduler-id", holder); metadata.set("chairlift-term", `${term}`); }
  return { code, metadata, details: `${grpc.status[code]}: held by ${holder} at term ${term}` };
}
const end = (call, code) => call?.emit("error", refusal(code));

function open({ request: { scheduler_id: asks, term: asked } }, answer) {
  if (asks !== holder && holder ? (asked ? asked <= term : live) : asked && asked < term) return answer(refusal(PERMISSION_DENIED));
  if (epoch) past.set(epoch.id, holder);
  const code = asks === holder ? FAILED_PRECONDITION : PERMISSION_DENIED;
  [holder, term] = [asks, asked || term + 1];
  end(live, code);
  live = null;
  epoch = { id: 1 + randomBytes(6).readUIntLE(0, 6), // 64 bits on the wire; numbers of JavaScript have 53
    sequences: new Map(), used: new Set(), kept: new Map(), last: 0, acked: 0 };
  answer(null, { ...CAPACITY, epoch: epoch.id, term });
}

function execute(call) {
  call.on("data", (plan) => {
    if (plan.epoch !== epoch?.id) return end(call, (past.get(plan.epoch) ?? holder) === holder ? FAILED_PRECONDITION : PERMISSION_DENIED);
    if (live !== call) { end(live, ABORTED); live = call; }
    try {
      call.write(answered(plan));
    } catch (error) {
      past.set(epoch.id, holder);
      epoch = null;
      call.emit("error", { code: DATA_LOSS, details: error.message });
    }
  });
  const gone = () => { if (live === call) live = null; };
  call.on("end", () => { gone(); call.end(); }).on("cancelled", gone).on("error", gone).on("close", gone);
}

function answered(plan) { // each plan once, in order; one that comes again gets the kept result
  const kept = epoch.kept.get(plan.step_id);
  if (kept) { demand(isDeepStrictEqual(kept.plan, plan), "a plan came again and differs"); return kept.result; }
  demand(plan.step_id === epoch.last + 1, `step ${plan.step_id} came after step ${epoch.last}`);
  demand(plan.acked_step_id >= epoch.acked && plan.acked_step_id <= epoch.last, "acked_step_id names no result");
  demand(plan.step_id - plan.acked_step_id <= CAPACITY.max_window, "too many plans are unanswered");
  [epoch.last, epoch.acked] = [plan.step_id, plan.acked_step_id];
  for (const step of epoch.kept.keys()) if (step <= epoch.acked) epoch.kept.delete(step);
  const result = run(plan);
  epoch.kept.set(plan.step_id, { plan, result });
  return result;
}

function run(plan) {
  const { sequences, used } = epoch, result = { epoch: epoch.id, step_id: plan.step_id, seq_ids: [], num_sampled: [], token_ids: [], finished: [], errors: [] };
  demand(!plan.block_copies.length && !plan.zero_block_ids.length && !plan.draft_tokens.length, "a reserved field is set");
  for (const [id, sequence] of sequences) if (sequence.ended <= epoch.acked || plan.released_seq_ids.includes(id)) sequences.delete(id);
  for (const { seq_id: id, token_ids, block_ids, num_computed_tokens: computed, num_prompt_tokens: prompt, sampling } of plan.admitted) {
    demand(!used.has(id) && computed < token_ids.length, `sequence ${id} was used before, or has nothing to compute`);
    demand(block_ids.every((block) => block < CAPACITY.num_blocks), "no such block");
    const ends = [...sampling.stop_token_ids, ...(sampling.ignore_eos ? [] : CAPACITY.eos_token_ids)];
    const isBad = token_ids.some((token) => token >= CAPACITY.vocab_size);
    if (isBad) result.errors.push({ seq_id: id, message: "a token id is outside the vocabulary", status_code: grpc.status.INVALID_ARGUMENT });
    used.add(id);
    sequences.set(id, { tokens: [...token_ids], computed, prompt, sampling, ends, blocks: block_ids.length, ended: isBad ? plan.step_id : Infinity });
  }
  demand(plan.grown_seq_ids.length === plan.num_new_blocks.length && sum(plan.num_new_blocks) === plan.new_block_ids.length, "ragged growth");
  demand(plan.grown_seq_ids.every((id) => sequences.has(id)) && plan.new_block_ids.every((block) => block < CAPACITY.num_blocks), "no such sequence or block");
  plan.grown_seq_ids.forEach((id, i) => { sequences.get(id).blocks += plan.num_new_blocks[i]; });
  demand(plan.seq_ids.length === plan.num_tokens.length && new Set(plan.seq_ids).size === plan.seq_ids.length, "ragged rows, or two of one sequence");
  demand(plan.seq_ids.length <= CAPACITY.max_num_seqs && sum(plan.num_tokens) <= CAPACITY.max_num_batched_tokens, "the plan is above the capacity");
  demand(plan.seq_ids.every((id) => sequences.has(id)), "a row's sequence is unknown");
  demand(sum(plan.seq_ids.map((id) => sequences.get(id).computed)) === plan.positions_sum, "positions_sum is wrong");
  plan.seq_ids.forEach((id, i) => row(result, id, sequences.get(id), plan.num_tokens[i]));
  return result;
}

function row(result, id, sequence, count) {
  const { tokens, prompt, sampling, ends } = sequence;
  sequence.computed += count;
  if (sequence.ended !== Infinity) return; // a ghost: it counts in positions_sum and reports nothing
  demand(count >= 1 && sequence.computed <= tokens.length, "a row past the known tokens");
  demand(sequence.computed <= sequence.blocks * CAPACITY.block_size, "a row past its blocks");
  const samples = sequence.computed === tokens.length;
  result.seq_ids.push(id);
  result.num_sampled.push(samples ? 1 : 0);
  if (!samples) return;
  let token = createHash("sha256").update(tokens.join()).digest().readUInt32LE() % CAPACITY.vocab_size;
  while (tokens.length - prompt < sampling.min_tokens && ends.includes(token)) token = (token + 1) % CAPACITY.vocab_size;
  tokens.push(token);
  result.token_ids.push(token);
  const isStop = ends.includes(token);
  if (!isStop && tokens.length - prompt < sampling.max_tokens && tokens.length < CAPACITY.max_seq_len) return;
  sequence.ended = result.step_id;
  result.finished.push({ seq_id: id, reason: isStop ? "FINISH_REASON_STOP" : "FINISH_REASON_LENGTH", ...(isStop && { matched_token_id: token }) });
}

const root = fileURLToPath(new URL("../..", import.meta.url)); // where protos/ is
const definition = protoLoader.loadSync("protos/v1/executor.proto", { includeDirs: [root], keepCase: true, longs: Number, enums: String, defaults: true });
const server = new grpc.Server();
server.addService(definition["chairlift.v1.Executor"], { Open: open, Execute: execute });
new HealthImplementation({ "": "SERVING", "chairlift.v1.Executor": "SERVING" }).addToServer(server);
const address = process.argv[2] ?? "127.0.0.1:50053";
server.bindAsync(address, grpc.ServerCredentials.createInsecure(), (error) => {
  if (error) throw error;
  console.log(`listening on ${address}`);
});
