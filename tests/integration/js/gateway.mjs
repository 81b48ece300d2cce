// The OpenAI JavaScript SDK with keys of a gateway; prints what each of them got as JSON.
// Usage: node gateway.mjs BASE_URL MODEL GOOD ELSEWHERE LIMITED EXPIRED
import OpenAI from "openai";

const [baseURL, model, good, elsewhere, limited, expired] = process.argv.slice(2);
const messages = [{ role: "user", content: "Hello" }];
const as = (apiKey) => new OpenAI({ baseURL, apiKey, maxRetries: 0 });

// How a second chat is refused, when the first was not.
async function refusal(apiKey) {
  try {
    await as(apiKey).chat.completions.create({ model, messages });
    await as(apiKey).chat.completions.create({ model, messages });
  } catch (error) {
    return {
      kind: error.constructor.name,
      code: error.code,
      retryAfter: error.headers.get("retry-after"),
      remaining: error.headers.get("x-ratelimit-remaining-requests"),
    };
  }
}

const told = { good: { models: [], stream: "" } };
for await (const one of await as(good).models.list()) {
  told.good.models.push(one.id);
}
const chat = await as(good).chat.completions.create({ model, messages });
told.good.chat = chat.choices[0].message.content;
for await (const chunk of await as(good).chat.completions.create({ model, messages, stream: true })) {
  told.good.stream += chunk.choices[0]?.delta?.content ?? "";
}
told.nobody = await refusal("sk-argosy-nobody");
told.elsewhere = await refusal(elsewhere);
told.limited = await refusal(limited);
await new Promise((resolve) => setTimeout(resolve, 1000));
told.expired = await refusal(expired);

console.log(JSON.stringify(told));
