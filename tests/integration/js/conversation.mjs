// One conversation through the official JavaScript clients of all APIs. Prints a transcript of each client as JSON.
// The clients of `tests/support/conversation.py` ask the same questions in Python.
// Usage: node conversation.mjs BASE_URL MODEL SCRIPT
import Anthropic from "@anthropic-ai/sdk";
import { betaTool } from "@anthropic-ai/sdk/helpers/beta/json-schema";
import { zodOutputFormat } from "@anthropic-ai/sdk/helpers/zod";
import { Ollama } from "ollama";
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const [url, model, argument] = process.argv.slice(2);
const script = JSON.parse(argument);
const { system, maxTokens, toolResult } = script;
const Person = z.object({ name: z.string().max(24), age: z.int() });

const openai = new OpenAI({ baseURL: `${url}/v1`, apiKey: "unused", maxRetries: 0 });
const anthropic = new Anthropic({ baseURL: url, apiKey: "unused", maxRetries: 0 });
const ollama = new Ollama({ host: url });

const chatMessages = (text) => [
  { role: "system", content: system },
  { role: "user", content: text },
];
const userMessages = (text) => [{ role: "user", content: text }];
const functionTool = (tool) => ({ type: "function", function: tool });
const text = (parts) => parts.join("");

// --- OpenAI: chat completions ---

function chatFields({ stop, effort, tool }, messages) {
  const fields = { model, max_tokens: maxTokens, temperature: 0, messages };
  if (stop.length) fields.stop = stop;
  if (effort) fields.reasoning_effort = effort;
  if (tool) fields.tools = [functionTool(tool)];
  return fields;
}

function readChat(response) {
  const { message } = response.choices[0];
  const calls = (message.tool_calls ?? []).map((call) => [call.function.name, JSON.parse(call.function.arguments)]);
  return {
    text: message.content ?? "",
    thinking: message.reasoning_content ?? "",
    calls,
    totalTokens: response.usage.total_tokens,
  };
}

const completions = openai.chat.completions;
const chat = {
  async ask(question) {
    const fields = chatFields(question, chatMessages(question.text));
    if (!question.stream) return readChat(await completions.create(fields));
    const stream = completions.stream({ ...fields, stream_options: { include_usage: true } });
    const thoughts = []; // the helper keeps only the last delta of fields that it does not know
    stream.on("chunk", ({ choices }) => thoughts.push(choices[0]?.delta.reasoning_content ?? ""));
    return { ...readChat(await stream.finalChatCompletion()), thinking: text(thoughts) };
  },
  async runToolLoop(question) {
    const calls = [];
    const call = (query) => {
      calls.push([question.tool.name, query]);
      return toolResult;
    };
    const tool = functionTool({ ...question.tool, parse: JSON.parse, function: call });
    const fields = chatFields({ ...question, tool: null }, chatMessages(question.text));
    const runner = completions.runTools({
      ...fields,
      tools: [tool],
      stream: question.stream,
      ...(question.stream && { stream_options: { include_usage: true } }),
    });
    return { ...readChat(await runner.finalChatCompletion()), calls };
  },
  async parse(question) {
    const fields = chatFields(question, chatMessages(question.text));
    const response = await completions.parse({ ...fields, response_format: zodResponseFormat(Person, "Person") });
    return response.choices[0].message.parsed;
  },
  fail: (missing) => completions.create({ model: missing, messages: chatMessages("") }),
  async cancel(question) {
    const stream = await completions.create({ ...chatFields(question, chatMessages(question.text)), stream: true });
    for await (const chunk of stream) {
      if (chunk.choices[0].delta.content) return chunk.choices[0].delta.content;
    }
  },
};

// --- OpenAI: responses ---

function responseFields({ effort, tool }, input) {
  const fields = { model, instructions: system, max_output_tokens: maxTokens, temperature: 0, input };
  if (effort) fields.reasoning = { effort };
  if (tool) fields.tools = [{ type: "function", strict: false, ...tool }];
  return fields;
}

async function respond(question, input) {
  const fields = responseFields(question, input);
  return question.stream ? openai.responses.stream(fields).finalResponse() : openai.responses.create(fields);
}

// The final response of a stream has no `output_text`.
const outputText = ({ output }) => text(output.flatMap((item) => item.content ?? []).map(readOutputPart));
const readOutputPart = (part) => (part.type === "output_text" ? part.text : "");
const functionCalls = (response) => response.output.filter((item) => item.type === "function_call");
const readCalls = (response) => functionCalls(response).map((call) => [call.name, JSON.parse(call.arguments)]);
const responses = {
  async ask(question) {
    const response = await respond(question, question.text);
    const reasoning = response.output.filter((item) => item.type === "reasoning");
    return {
      text: outputText(response),
      thinking: text(reasoning.map((item) => item.content[0].text)),
      calls: readCalls(response),
      totalTokens: response.usage.total_tokens,
    };
  },
  async runToolLoop(question) {
    const input = userMessages(question.text);
    const calls = [];
    for (;;) {
      const response = await respond(question, input);
      const made = functionCalls(response);
      if (!made.length) {
        return { text: outputText(response), thinking: "", calls, totalTokens: response.usage.total_tokens };
      }
      calls.push(...readCalls(response));
      input.push(...response.output);
      for (const { call_id } of made) input.push({ type: "function_call_output", call_id, output: toolResult });
    }
  },
  async parse(question) {
    const fields = { ...responseFields(question, question.text), text: { format: zodTextFormat(Person, "Person") } };
    return (await openai.responses.parse(fields)).output_parsed;
  },
  fail: (missing) => openai.responses.create({ model: missing, input: "" }),
  async cancel(question) {
    const stream = await openai.responses.create({ ...responseFields(question, question.text), stream: true });
    for await (const event of stream) {
      if (event.type === "response.output_text.delta") return event.delta;
    }
  },
};

// --- Anthropic ---

function messageFields({ text, stop, effort, tool }) {
  const fields = { model, system, max_tokens: maxTokens, temperature: 0, messages: userMessages(text) };
  fields.thinking = { type: "adaptive" };
  if (stop.length) fields.stop_sequences = stop;
  if (effort) fields.output_config = { effort };
  if (tool) fields.tools = [{ name: tool.name, description: tool.description, input_schema: tool.parameters }];
  return fields;
}

function readMessage({ content, usage }) {
  const blocks = (type) => content.filter((block) => block.type === type);
  return {
    text: text(blocks("text").map((block) => block.text)),
    thinking: text(blocks("thinking").map((block) => block.thinking)),
    calls: blocks("tool_use").map((block) => [block.name, block.input]),
    totalTokens: usage.input_tokens + usage.cache_read_input_tokens + usage.output_tokens,
  };
}

const messages = {
  async ask(question) {
    const fields = messageFields(question);
    const message = question.stream
      ? await anthropic.messages.stream(fields).finalMessage()
      : await anthropic.messages.create(fields);
    return readMessage(message);
  },
  async runToolLoop(question) {
    const { name, description, parameters: inputSchema } = question.tool;
    const calls = [];
    const run = (query) => {
      calls.push([name, query]);
      return toolResult;
    };
    const tools = [betaTool({ name, description, inputSchema, run })];
    const runner = anthropic.beta.messages.toolRunner({ ...messageFields(question), tools, stream: question.stream });
    return { ...readMessage(await runner.runUntilDone()), calls };
  },
  async parse(question) {
    const fields = { ...messageFields(question), output_config: { format: zodOutputFormat(Person) } };
    return (await anthropic.messages.parse(fields)).parsed_output;
  },
  fail: (missing) => anthropic.messages.create({ model: missing, max_tokens: 9, messages: userMessages("Hi") }),
  async cancel(question) {
    for await (const event of anthropic.messages.stream(messageFields(question))) {
      if (event.delta?.type === "text_delta") return event.delta.text;
    }
  },
};

// --- Ollama ---

function ollamaFields({ stop, effort, tool, stream }, messages) {
  const fields = { model, messages, stream, options: { temperature: 0, num_predict: maxTokens, stop } };
  if (effort) fields.think = effort;
  if (tool) fields.tools = [functionTool(tool)];
  return fields;
}

async function chatLines(question, messages) {
  const response = await ollama.chat(ollamaFields(question, messages));
  if (!question.stream) return [response];
  const lines = [];
  for await (const line of response) lines.push(line);
  return lines;
}

function readLines(lines) {
  const calls = lines.flatMap((line) => line.message.tool_calls ?? []);
  const last = lines.at(-1);
  return {
    text: text(lines.map((line) => line.message.content ?? "")),
    thinking: text(lines.map((line) => line.message.thinking ?? "")),
    calls: calls.map((call) => [call.function.name, call.function.arguments]),
    totalTokens: last.prompt_eval_count + last.eval_count,
  };
}

const ollamaChat = {
  ask: async (question) => readLines(await chatLines(question, chatMessages(question.text))),
  async runToolLoop(question) {
    const history = chatMessages(question.text);
    const calls = [];
    for (;;) {
      const lines = await chatLines(question, history);
      const answer = readLines(lines);
      if (!answer.calls.length) return { ...answer, calls };
      calls.push(...answer.calls);
      const tool_calls = lines.flatMap((line) => line.message.tool_calls ?? []);
      history.push({ role: "assistant", content: answer.text, tool_calls });
      for (const [tool_name] of answer.calls) history.push({ role: "tool", tool_name, content: toolResult });
    }
  },
  async parse(question) {
    const fields = ollamaFields({ ...question, stream: false }, chatMessages(question.text));
    const response = await ollama.chat({ ...fields, format: z.toJSONSchema(Person) });
    return Person.parse(JSON.parse(response.message.content));
  },
  fail: (missing) => ollama.chat({ model: missing, messages: chatMessages("") }),
  async cancel(question) {
    const stream = await ollama.chat({ ...ollamaFields(question, chatMessages(question.text)), stream: true });
    for await (const line of stream) {
      if (line.message.content) {
        stream.abort(); // leaving the loop does not close this client's connection
        return line.message.content;
      }
    }
  },
};

async function converse(client) {
  const answers = {};
  for (const [name, question] of Object.entries(script.questions)) answers[name] = await client.ask(question);
  return {
    answers,
    toolLoop: await client.runToolLoop(script.toolLoop),
    typed: await client.parse(script.typed),
    error: await client.fail(script.missingModel).then(
      () => [200, ""],
      (error) => [error.status ?? error.status_code, error.message],
    ),
    cancelledAfter: await client.cancel(script.cancelled),
  };
}

const clients = { chat, responses, anthropic: messages, ollama: ollamaChat };
const conversations = Object.entries(clients).map(async ([name, client]) => [name, await converse(client)]);
console.log(JSON.stringify(Object.fromEntries(await Promise.all(conversations))));
