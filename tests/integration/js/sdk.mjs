// The OpenAI JavaScript SDK against a running replica. Prints the results as JSON.
// Usage: node sdk.mjs BASE_URL MODEL
import OpenAI from "openai";

const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "unused", maxRetries: 0 });
const messages = [{ role: "user", content: "Hello" }];

const results = {};

const chat = await client.chat.completions.create({ model, messages });
results.chat = chat.choices[0].message.content;

results.stream = "";
const stream = await client.chat.completions.create({
  model,
  messages,
  stream: true,
  stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  results.stream += chunk.choices[0]?.delta?.content ?? "";
  results.finish = chunk.choices[0]?.finish_reason ?? results.finish;
  results.usage = chunk.usage?.completion_tokens ?? results.usage;
}

const completion = await client.completions.create({ model, prompt: "Once", max_tokens: 100 });
results.completion = completion.choices[0].text;

results.completionStream = "";
const parts = await client.completions.create({ model, prompt: "Once", max_tokens: 100, stream: true });
for await (const part of parts) {
  results.completionStream += part.choices[0].text;
}

results.models = [];
for await (const card of await client.models.list()) {
  results.models.push(card.id);
}

try {
  await client.chat.completions.create({ model, messages, temperature: -1 });
} catch (error) {
  results.error = { status: error.status, param: error.param, kind: error.constructor.name };
}

console.log(JSON.stringify(results));
