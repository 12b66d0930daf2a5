// An executor of docs/protocol.md in one page: npm install && node executor.mjs [ADDRESS]
// To its "model" a hash of the context is the likeliest token, and each id after it is less likely than the one before.
// `chairlift conformance ADDRESS` finds nothing to complain of.
import { createHash, randomBytes } from "node:crypto";
import { fileURLToPath } from "node:url";
import { isDeepStrictEqual } from "node:util";
import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";
import { HealthImplementation } from "grpc-health-check";

const VOCABULARY = 97, CAPACITY = { protocol_revision: 1, num_blocks: 512, block_size: 4, max_num_seqs: 8, max_num_batched_tokens: 64, max_seq_len: 128,
  max_window: 2, vocab_size: VOCABULARY, eos_token_ids: [0], row_invariant: true, dtype: "none", device: "toy", instance_id: randomBytes(8).toString("hex") };
const { ABORTED, DATA_LOSS, FAILED_PRECONDITION, INVALID_ARGUMENT, PERMISSION_DENIED } = grpc.status;
let holder = "", term = 0, epoch = null, live = null, opened = 0; // live: the newest stream that brought a plan
const whose = new Map(); // each epoch there was

const hash = (text) => createHash("sha256").update(text).digest().readUInt32LE();
const sum = (numbers) => numbers.reduce((total, number) => total + number, 0);
const demand = (holds, sentence) => { if (!holds) throw new Error(sentence); }; // what is thrown ends the epoch
function refusal(code, details = `held by ${holder} at term ${term}`) {
  const metadata = new grpc.Metadata();
  metadata.set("chairlift-scheduler-id", holder);
  metadata.set("chairlift-term", `${term}`);
  return { code, details, metadata };
}
const refuse = (call, ...why) => call?.emit("error", refusal(...why));

function open({ request }, answer) {
  const asks = request.scheduler_id, asked = Number(request.term), isHolder = asks === holder;
  if (holder && !(isHolder ? !asked || asked >= term : asked ? asked > term : !live)) return answer(refusal(PERMISSION_DENIED));
  [holder, term] = [asks, asked || term + 1];
  refuse(live, isHolder ? FAILED_PRECONDITION : PERMISSION_DENIED);
  live = null;
  epoch = { id: `${randomBytes(8).readBigUInt64LE() | 1n}`, sequences: new Map(), used: new Set(), kept: new Map(), last: 0, acked: 0 };
  whose.set(epoch.id, holder);
  answer(null, { ...CAPACITY, epoch: epoch.id, term });
}

function execute(call) {
  const leave = () => { if (live === call) live = null; };
  call.number = ++opened;
  call.on("data", (plan) => {
    if (plan.epoch !== epoch?.id) return refuse(call, (whose.get(plan.epoch) ?? holder) === holder ? FAILED_PRECONDITION : PERMISSION_DENIED);
    if (live?.number > call.number) return refuse(call, ABORTED);
    if (live !== call) refuse(live, ABORTED);
    live = call;
    try { call.write(answered(plan)); } catch ({ message }) { epoch = null; refuse(call, DATA_LOSS, message); }
  }).on("end", () => { leave(); call.end(); }).on("cancelled", leave).on("error", leave).on("close", leave);
}

function answered(plan) { // each plan once, in order; one that comes again gets the kept result
  const step = Number(plan.step_id), acked = Number(plan.acked_step_id), kept = epoch.kept.get(step);
  demand(kept ? isDeepStrictEqual(kept.plan, plan) : step === epoch.last + 1, "a plan is out of order, or came again and differs");
  if (kept) return kept.result;
  demand(acked >= epoch.acked && acked <= epoch.last && step - acked <= CAPACITY.max_window, "acked_step_id names no result, or too many are unanswered");
  Object.assign(epoch, { last: step, acked });
  for (const old of epoch.kept.keys()) if (old <= acked) epoch.kept.delete(old);
  const result = run(plan, step);
  epoch.kept.set(step, { plan, result });
  return result;
}

function run(plan, step) {
  const { sequences, used } = epoch, find = (id) => sequences.get(id) ?? demand(false, `sequence ${id} is unknown`);
  const result = { epoch: epoch.id, step_id: step, seq_ids: [], num_sampled: [], token_ids: [], finished: [], errors: [] };
  demand(!plan.block_copies.length && !plan.zero_block_ids.length && !plan.draft_tokens.length, "a field is set that is not served");
  for (const [id, { ended }] of sequences) if (ended <= epoch.acked || plan.released_seq_ids.includes(id)) sequences.delete(id);
  for (const { seq_id: id, token_ids: tokens, block_ids, num_computed_tokens: computed, num_prompt_tokens: prompt, sampling } of plan.admitted) {
    demand(id && !used.has(id) && computed < tokens.length && prompt && prompt <= tokens.length, `sequence ${id} cannot be admitted`);
    const ends = [...sampling.stop_token_ids.map(Number), ...(sampling.ignore_eos ? [] : CAPACITY.eos_token_ids)];
    const isBad = tokens.length >= CAPACITY.max_seq_len || tokens.some((token) => token >= VOCABULARY) || isMore(sampling);
    if (isBad) result.errors.push({ seq_id: id, message: "too long, outside the vocabulary, or not served here", status_code: INVALID_ARGUMENT });
    used.add(id);
    sequences.set(id, { tokens: [...tokens], computed, prompt, sampling, ends, blocks: block_ids.length, ended: isBad ? step : Infinity });
  }
  const blocks = [...plan.new_block_ids, ...plan.admitted.flatMap((one) => one.block_ids)], rows = new Set(plan.seq_ids);
  demand(blocks.every((block) => block < CAPACITY.num_blocks), "no such block");
  demand(plan.grown_seq_ids.length === plan.num_new_blocks.length && sum(plan.num_new_blocks) === plan.new_block_ids.length, "ragged growth");
  demand(plan.seq_ids.length === plan.num_tokens.length && rows.size === plan.seq_ids.length, "ragged rows, or two of one sequence");
  demand(rows.size <= CAPACITY.max_num_seqs && sum(plan.num_tokens) <= CAPACITY.max_num_batched_tokens, "the plan is above the capacity");
  plan.grown_seq_ids.forEach((id, i) => { find(id).blocks += plan.num_new_blocks[i]; });
  demand(sum(plan.seq_ids.map((id) => find(id).computed)) === Number(plan.positions_sum), "positions_sum is wrong");
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
  const token = choice(sequence);
  tokens.push(token);
  result.token_ids.push(token);
  const isStop = ends.includes(token);
  if (!isStop && tokens.length - prompt < sampling.max_tokens && tokens.length < CAPACITY.max_seq_len) return;
  sequence.ended = result.step_id;
  result.finished.push({ seq_id: id, reason: isStop ? "FINISH_REASON_STOP" : "FINISH_REASON_LENGTH", ...(isStop && { matched_token_id: token }) });
}

function choice({ tokens, prompt, sampling: { temperature = 1, top_p = 1, top_k = 0, min_p = 0, min_tokens = 0, seed = 0 }, ends }) {
  const index = tokens.length - prompt, first = hash(tokens.join());
  const ids = Array.from({ length: VOCABULARY }, (_, i) => (first + i) % VOCABULARY).filter((id) => index >= min_tokens || !ends.includes(id));
  if (temperature === 0) return ids[0];
  let weights = ids.map((_, i) => Math.exp(-i / temperature)).slice(0, top_k > 0 ? top_k : VOCABULARY), before = 0;
  const enough = top_p * sum(weights);
  weights = weights.filter((weight) => (before += weight) - weight < enough && weight >= min_p); // the first weighs 1
  let left = (hash(`${seed} ${index}`) / 2 ** 32) * sum(weights);
  return ids[weights.findIndex((weight) => (left -= weight) < 0)];
}

const isMore = (sampling) => ["logprobs", "prompt_logprobs", "constraint"].some((name) => sampling[name] !== undefined) // than every executor serves
  || (sampling.repetition_penalty ?? 1) !== 1 || sampling.presence_penalty || sampling.frequency_penalty
  || [Object.keys(sampling.logit_bias), sampling.allowed_token_ids, sampling.banned_token_ids].some((ids) => ids.length);

const includeDirs = [fileURLToPath(new URL("../..", import.meta.url))]; // where protos/ is
// Numbers of 64 bits come as text, so that seeds stay whole. (Keys of `logit_bias` would come as their bytes, eight characters.)
const options = { includeDirs, keepCase: true, longs: String, enums: String, defaults: true, oneofs: true };
const contract = protoLoader.loadSync("protos/v1/executor.proto", options);
const server = new grpc.Server(), address = process.argv[2] ?? "127.0.0.1:50053";
server.addService(contract["chairlift.v1.Executor"], { Open: open, Execute: execute });
new HealthImplementation({ "": "SERVING", "chairlift.v1.Executor": "SERVING" }).addToServer(server);
server.bindAsync(address, grpc.ServerCredentials.createInsecure(), (error) => { demand(!error, error); console.log(`listening on ${address}`); });
