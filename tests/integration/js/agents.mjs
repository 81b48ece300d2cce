// Tool helpers and typed answers of the OpenAI JavaScript SDK and the AI SDK. Prints what each returned as JSON.
// Usage: node agents.mjs BASE_URL MODEL
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import OpenAI from "openai";
import { zodFunction, zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const [baseURL, model] = process.argv.slice(2);
const question = "What is the weather in Rome?";
const messages = [{ role: "user", content: question }];
const description = "Get the weather of a city.";
const Forecast = z.object({
  city: z.string().max(24),
  temperature: z.number().int().min(-90).max(60),
  sky: z.enum(["clear", "cloudy", "rain"]),
});
const Query = z.object({ city: z.string().max(24), unit: z.enum(["celsius", "fahrenheit"]) });
const results = {};

// Return a tool that records the arguments of its calls.
function weatherStation(calls) {
  return (query) => {
    calls.push(Query.parse(query));
    return "21 degrees and clear";
  };
}

// --- OpenAI SDK ---

const client = new OpenAI({ baseURL, apiKey: "unused", maxRetries: 0 });
const options = { model, messages, max_tokens: 256, temperature: 0 };
const chat = client.chat.completions;

const typed = await chat.parse({ ...options, response_format: zodResponseFormat(Forecast, "forecast") });
results.parsed = typed.choices[0].message.parsed;

const definition = { name: "get_weather", description, parameters: Query };
const required = { ...options, tool_choice: "required", parallel_tool_calls: false, tools: [zodFunction(definition)] };
const whole = await chat.parse(required);
results.parsedArguments = whole.choices[0].message.tool_calls.map((call) => call.function.parsed_arguments);

const stream = chat.stream(required);
let deltas = "";
stream.on("tool_calls.function.arguments.delta", (event) => (deltas += event.arguments_delta));
const streamed = (await stream.finalChatCompletion()).choices[0];
results.streamedArguments = streamed.message.tool_calls.map((call) => call.function.arguments);
results.wholeArguments = whole.choices[0].message.tool_calls.map((call) => call.function.arguments);
results.deltas = deltas;
results.streamedContent = streamed.message.content;
results.finishReason = streamed.finish_reason;

results.runTools = { calls: [] };
const implementation = { ...definition, function: weatherStation(results.runTools.calls) };
const named = { type: "function", function: { name: "get_weather" } };
const runner = chat.runTools(
  { ...options, tool_choice: named, tools: [zodFunction(implementation)] },
  { maxChatCompletions: 2 },
);
await runner.done();
results.runTools.roles = runner.messages.map((message) => message.role);

results.streamingRunner = { calls: [], chunks: 0 };
const streamingTool = { ...definition, function: weatherStation(results.streamingRunner.calls) };
const streamingRunner = chat.runTools(
  { ...options, stream: true, tools: [zodFunction(streamingTool)] },
  { maxChatCompletions: 3 },
);
for await (const _ of streamingRunner) results.streamingRunner.chunks += 1;
results.streamingRunner.roles = streamingRunner.messages.map((message) => message.role);

// --- AI SDK ---

const provider = createOpenAICompatible({
  name: "argosy",
  baseURL,
  apiKey: "unused",
  supportsStructuredOutputs: true,
  includeUsage: true,
});
const settings = {
  model: provider(model),
  prompt: question,
  temperature: 0,
  maxOutputTokens: 256,
  maxRetries: 0,
};
results.generatedObject = (await generateObject({ ...settings, schema: Forecast })).object;

// Require a call in the first step only.
function loopSettings(calls) {
  const execute = async (query) => weatherStation(calls)(query);
  return {
    ...settings,
    tools: { get_weather: tool({ description, inputSchema: Query, execute }) },
    stopWhen: stepCountIs(3),
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" }),
  };
}

results.generateText = { calls: [] };
const generated = await generateText(loopSettings(results.generateText.calls));
results.generateText.text = generated.text;
results.generateText.finishReasons = generated.steps.map((step) => step.finishReason);

results.streamText = { calls: [], parts: {} };
const flow = streamText(loopSettings(results.streamText.calls));
for await (const part of flow.fullStream) {
  if (part.type === "error") throw part.error;
  results.streamText.parts[part.type] = (results.streamText.parts[part.type] ?? 0) + 1;
}
results.streamText.text = await flow.text;
results.streamText.outputTokens = (await flow.totalUsage).outputTokens;

console.log(JSON.stringify(results));
