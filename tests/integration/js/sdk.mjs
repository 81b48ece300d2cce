// The OpenAI JavaScript SDK against a running replica; prints what it got as JSON.
// Usage: node sdk.mjs BASE_URL MODEL
import OpenAI from "openai";

const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "unused", maxRetries: 0 });
const messages = [{ role: "user", content: "Hello" }];

const told = {};

const chat = await client.chat.completions.create({ model, messages });
told.chat = chat.choices[0].message.content;

told.stream = "";
const stream = await client.chat.completions.create({
  model,
  messages,
  stream: true,
  stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  told.stream += chunk.choices[0]?.delta?.content ?? "";
  told.finish = chunk.choices[0]?.finish_reason ?? told.finish;
  told.usage = chunk.usage?.completion_tokens ?? told.usage;
}

const completion = await client.completions.create({ model, prompt: "Once", max_tokens: 100 });
told.completion = completion.choices[0].text;

told.completionStream = "";
const parts = await client.completions.create({ model, prompt: "Once", max_tokens: 100, stream: true });
for await (const part of parts) {
  told.completionStream += part.choices[0].text;
}

told.models = [];
for await (const one of await client.models.list()) {
  told.models.push(one.id);
}

try {
  await client.chat.completions.create({ model, messages, temperature: -1 });
} catch (error) {
  told.error = { status: error.status, param: error.param, kind: error.constructor.name };
}

console.log(JSON.stringify(told));
