// Batches with the JavaScript SDKs of OpenAI and Anthropic. Prints what they return as JSON.
// Usage: node batches.mjs URL KEY MODEL
import Anthropic from "@anthropic-ai/sdk";
import OpenAI, { toFile } from "openai";

const [url, apiKey, model] = process.argv.slice(2);
const openai = new OpenAI({ baseURL: `${url}/v1`, apiKey, maxRetries: 0 });
const anthropic = new Anthropic({ baseURL: url, apiKey, maxRetries: 0 });
const messages = [{ role: "user", content: "Hi" }];
const endpoint = "/v1/chat/completions";
const found = {};

async function until(retrieve, hasEnded) {
  for (;;) {
    const batch = await retrieve();
    if (hasEnded(batch)) return batch;
    await new Promise((resolve) => setTimeout(resolve, 100));
  }
}

async function create(count) {
  const lines = Array.from({ length: count }, (_, number) =>
    JSON.stringify({ custom_id: `q${number}`, method: "POST", url: endpoint, body: { model, messages } }),
  );
  const file = await openai.files.create({ file: await toFile(Buffer.from(lines.join("\n")), "in.jsonl"), purpose: "batch" });
  return openai.batches.create({ input_file_id: file.id, endpoint, completion_window: "24h" });
}

const endOf = (batch) => until(() => openai.batches.retrieve(batch.id), (each) => ["completed", "cancelled"].includes(each.status));
const answered = await endOf(await create(3));
const output = await (await openai.files.content(answered.output_file_id)).text();
const cancelled = await openai.batches.cancel((await create(300)).id);
found.openai = { answered, output: output.trim().split("\n").map(JSON.parse), cancelled, ended: await endOf(cancelled), listed: [] };
for await (const each of openai.batches.list({ limit: 1 })) {
  found.openai.listed.push(each.id);
}

const requests = (count) =>
  Array.from({ length: count }, (_, number) => ({ custom_id: `q${number}`, params: { model, max_tokens: 20, messages } }));
const { batches } = anthropic.messages;
const endOfMessages = (batch) => until(() => batches.retrieve(batch.id), (each) => each.processing_status === "ended");
const readResults = async (batch) => {
  const results = [];
  for await (const each of await batches.results(batch.id)) {
    results.push(each);
  }
  return results;
};
const succeeded = await endOfMessages(await batches.create({ requests: requests(3) }));
const canceling = await batches.cancel((await batches.create({ requests: requests(300) })).id);
const ended = await endOfMessages(canceling);
found.anthropic = { succeeded, results: await readResults(succeeded), canceling, ended, endedResults: await readResults(ended) };
found.anthropic.deleted = await batches.delete(ended.id);
console.log(JSON.stringify(found));
