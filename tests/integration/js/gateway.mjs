// The OpenAI JavaScript SDK with keys of a gateway. Prints the responses and errors of each key as JSON.
// Usage: node gateway.mjs BASE_URL MODEL GOOD ELSEWHERE LIMITED EXPIRED
import OpenAI from "openai";

const [baseURL, model, good, elsewhere, limited, expired] = process.argv.slice(2);
const messages = [{ role: "user", content: "Hello" }];
const connect = (apiKey) => new OpenAI({ baseURL, apiKey, maxRetries: 0 });

// Return the error of the first chat, or of the second one.
async function refusal(apiKey) {
  try {
    await connect(apiKey).chat.completions.create({ model, messages });
    await connect(apiKey).chat.completions.create({ model, messages });
  } catch (error) {
    return {
      kind: error.constructor.name,
      code: error.code,
      retryAfter: error.headers.get("retry-after"),
      remaining: error.headers.get("x-ratelimit-remaining-requests"),
    };
  }
}

const results = { good: { models: [], stream: "" } };
for await (const card of await connect(good).models.list()) {
  results.good.models.push(card.id);
}
const chat = await connect(good).chat.completions.create({ model, messages });
results.good.chat = chat.choices[0].message.content;
for await (const chunk of await connect(good).chat.completions.create({ model, messages, stream: true })) {
  results.good.stream += chunk.choices[0]?.delta?.content ?? "";
}
results.unknown = await refusal("sk-argosy-unknown");
results.elsewhere = await refusal(elsewhere);
results.limited = await refusal(limited);
results.expired = await refusal(expired);

console.log(JSON.stringify(results));
