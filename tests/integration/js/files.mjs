// Files with the JavaScript SDKs of OpenAI and Anthropic. Prints what they return as JSON.
// Usage: node files.mjs URL KEY
import Anthropic, { toFile as toAnthropicFile } from "@anthropic-ai/sdk";
import OpenAI, { toFile } from "openai";

const [url, apiKey] = process.argv.slice(2);
const openai = new OpenAI({ baseURL: `${url}/v1`, apiKey, maxRetries: 0 });
const anthropic = new Anthropic({ baseURL: url, apiKey, maxRetries: 0 });
const found = {};

const content = '{"custom_id": "a"}\n';
const file = await openai.files.create({ file: await toFile(Buffer.from(content), "in.jsonl"), purpose: "batch" });
found.openai = { file, text: await (await openai.files.content(file.id)).text(), listed: [] };
for await (const each of openai.files.list({ purpose: "batch", limit: 1 })) {
  found.openai.listed.push(each.id);
}
found.openai.deleted = await openai.files.delete(file.id);

const upload = await openai.uploads.create({ bytes: 6, filename: "a.txt", mime_type: "text/plain", purpose: "user_data" });
const parts = [];
for (const data of ["one", "two"]) {
  parts.push(await openai.uploads.parts.create(upload.id, { data: await toFile(Buffer.from(data), "part") }));
}
found.upload = await openai.uploads.complete(upload.id, { part_ids: parts.map((part) => part.id) });
await openai.files.delete(found.upload.file.id);

const other = await anthropic.beta.files.upload({ file: await toAnthropicFile(Buffer.from("text"), "b.txt", { type: "text/plain" }) });
found.anthropic = { file: other, text: await (await anthropic.beta.files.download(other.id)).text(), listed: [] };
for await (const each of anthropic.beta.files.list()) {
  found.anthropic.listed.push(each.id);
}
found.anthropic.deleted = await anthropic.beta.files.delete(other.id);
console.log(JSON.stringify(found));
