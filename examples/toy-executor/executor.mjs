// An executor of docs/protocol.md in one page: npm install && node executor.mjs [ADDRESS]
// Its "model" is a hash of the whole context. `chairlift conformance ADDRESS` finds nothing to complain of.
import { createHash, randomBytes } from "node:crypto";
import { fileURLToPath } from "node:url";
import { isDeepStrictEqual } from "node:util";
import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";
import { HealthImplementation } from "grpc-health-check";

const CAPACITY = { protocol_revision: 1, num_blocks: 512, block_size: 4, max_num_seqs: 8, max_num_batched_tokens: 64, max_seq_len: 128,
  max_window: 2, vocab_size: 97, eos_token_ids: [0], row_invariant: true, dtype: "none", device: "toy", instance_id: randomBytes(8).toString("hex") };
const { ABORTED, DATA_LOSS, FAILED_PRECONDITION, INVALID_ARGUMENT, PERMISSION_DENIED } = grpc.status;
let holder = "", term = 0, epoch = null, live = null; // live: the newest stream that brought a plan
const whose = new Map(); // each epoch there was

const sum = (numbers) => numbers.reduce((total, number) => total + number, 0);
const demand = (holds, sentence) => { if (!holds) throw new Error(sentence); }; // what is thrown ends the epoch
function refusal(code, details = `held by ${holder} at term ${term}`) {
  const metadata = new grpc.Metadata();
  metadata.set("chairlift-scheduler-id", holder);
  metadata.set("chairlift-term", `${term}`);
  return { code, details, metadata };
}
const refuse = (call, ...why) => call?.emit("error", refusal(...why));

function open({ request: { scheduler_id: asks, term: asked } }, answer) {
  const isHolder = asks === holder;
  if (holder && !(isHolder ? !asked || asked >= term : asked ? asked > term : !live)) return answer(refusal(PERMISSION_DENIED));
  [holder, term] = [asks, asked || term + 1];
  refuse(live, isHolder ? FAILED_PRECONDITION : PERMISSION_DENIED);
  live = null;
  epoch = { id: 1 + randomBytes(6).readUIntLE(0, 6), // 64 bits on the wire; numbers of JavaScript have 53
    sequences: new Map(), used: new Set(), kept: new Map(), last: 0, acked: 0 };
  whose.set(epoch.id, holder);
  answer(null, { ...CAPACITY, epoch: epoch.id, term });
}

function execute(call) {
  const leave = () => { if (live === call) live = null; };
  call.on("data", (plan) => {
    if (plan.epoch !== epoch?.id) return refuse(call, (whose.get(plan.epoch) ?? holder) === holder ? FAILED_PRECONDITION : PERMISSION_DENIED);
    if (live !== call) refuse(live, ABORTED);
    live = call;
    try { call.write(answered(plan)); } catch ({ message }) { epoch = null; refuse(call, DATA_LOSS, message); }
  }).on("end", () => { leave(); call.end(); }).on("cancelled", leave).on("error", leave).on("close", leave);
}

function answered(plan) { // each plan once, in order; one that comes again gets the kept result
  const { step_id: step, acked_step_id: acked } = plan, kept = epoch.kept.get(step);
  demand(kept ? isDeepStrictEqual(kept.plan, plan) : step === epoch.last + 1, "a plan is out of order, or came again and differs");
  if (kept) return kept.result;
  demand(acked >= epoch.acked && acked <= epoch.last && step - acked <= CAPACITY.max_window, "acked_step_id names no result, or too many are unanswered");
  Object.assign(epoch, { last: step, acked });
  for (const old of epoch.kept.keys()) if (old <= acked) epoch.kept.delete(old);
  const result = run(plan);
  epoch.kept.set(step, { plan, result });
  return result;
}

function run(plan) {
  const { sequences, used } = epoch, find = (id) => sequences.get(id) ?? demand(false, `sequence ${id} is unknown`);
  const result = { epoch: epoch.id, step_id: plan.step_id, seq_ids: [], num_sampled: [], token_ids: [], finished: [], errors: [] };
  demand(!plan.block_copies.length && !plan.zero_block_ids.length && !plan.draft_tokens.length, "a reserved field is set");
  for (const [id, { ended }] of sequences) if (ended <= epoch.acked || plan.released_seq_ids.includes(id)) sequences.delete(id);
  for (const { seq_id: id, token_ids: tokens, block_ids, num_computed_tokens: computed, num_prompt_tokens: prompt, sampling } of plan.admitted) {
    demand(!used.has(id) && computed < tokens.length, `sequence ${id} was used before, or has nothing to compute`);
    const ends = [...sampling.stop_token_ids, ...(sampling.ignore_eos ? [] : CAPACITY.eos_token_ids)];
    const isBad = tokens.some((token) => token >= CAPACITY.vocab_size); // one row's error, not the epoch's
    if (isBad) result.errors.push({ seq_id: id, message: "a token id is outside the vocabulary", status_code: INVALID_ARGUMENT });
    used.add(id);
    sequences.set(id, { tokens: [...tokens], computed, prompt, sampling, ends, blocks: block_ids.length, ended: isBad ? plan.step_id : Infinity });
  }
  const blocks = [...plan.new_block_ids, ...plan.admitted.flatMap((one) => one.block_ids)], rows = new Set(plan.seq_ids);
  demand(blocks.every((block) => block < CAPACITY.num_blocks), "no such block");
  demand(plan.grown_seq_ids.length === plan.num_new_blocks.length && sum(plan.num_new_blocks) === plan.new_block_ids.length, "ragged growth");
  demand(plan.seq_ids.length === plan.num_tokens.length && rows.size === plan.seq_ids.length, "ragged rows, or two of one sequence");
  demand(rows.size <= CAPACITY.max_num_seqs && sum(plan.num_tokens) <= CAPACITY.max_num_batched_tokens, "the plan is above the capacity");
  plan.grown_seq_ids.forEach((id, i) => { find(id).blocks += plan.num_new_blocks[i]; });
  demand(sum(plan.seq_ids.map((id) => find(id).computed)) === plan.positions_sum, "positions_sum is wrong");
  plan.seq_ids.forEach((id, i) => row(result, id, find(id), plan.num_tokens[i]));
  return result;
}

function row(result, id, sequence, count) {
  const { tokens, prompt, sampling, ends, blocks } = sequence, computed = sequence.computed += count, samples = computed === tokens.length;
  if (sequence.ended !== Infinity) return; // a ghost: it counts in positions_sum and reports nothing
  demand(count >= 1 && computed <= Math.min(tokens.length, blocks * CAPACITY.block_size), "a row past its known tokens or its blocks");
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

const includeDirs = [fileURLToPath(new URL("../..", import.meta.url))]; // where protos/ is
const contract = protoLoader.loadSync("protos/v1/executor.proto", { includeDirs, keepCase: true, longs: Number, enums: String, defaults: true });
const server = new grpc.Server(), address = process.argv[2] ?? "127.0.0.1:50053";
server.addService(contract["chairlift.v1.Executor"], { Open: open, Execute: execute });
new HealthImplementation({ "": "SERVING", "chairlift.v1.Executor": "SERVING" }).addToServer(server);
server.bindAsync(address, grpc.ServerCredentials.createInsecure(), (error) => { demand(!error, error); console.log(`listening on ${address}`); });
