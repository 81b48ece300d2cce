// Embeddings with the OpenAI JavaScript SDK, which asks for base64 and decodes it. Prints the vectors as JSON.
// Usage: node embeddings.mjs BASE_URL MODEL TEXT...
import OpenAI from "openai";

const [baseURL, model, ...input] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const response = await client.embeddings.create({ model, input });
console.log(JSON.stringify(response.data.map((item) => item.embedding)));
