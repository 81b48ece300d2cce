// Functions that the model of the playground may call: their declaration, the calls, and the results that a person gives.
import { html, useState } from "../vendor.js";
import { visible } from "../core/format.js";
import { setQuery } from "../core/router.js";
import { Field, Name, Select } from "./parts.js";

const text = (description) => ({ type: "string", description });
// Declarations to begin with, and a result that each could have.
const EXAMPLES = {
  Weather: {
    name: "get_weather", description: "Returns the present weather of a city.",
    parameters: { type: "object", properties: { city: text("Name of the city"), unit: { type: "string", enum: ["celsius", "fahrenheit"] } }, required: ["city"] },
  },
  Orders: {
    name: "find_order", description: "Finds an order of the shop by its number.",
    parameters: { type: "object", properties: { number: { type: "integer", description: "Number of the order" } }, required: ["number"] },
  },
};
const RESULTS = { get_weather: '{"temperature": 21, "sky": "clear"}', find_order: '{"state": "sent", "arrives": "tomorrow"}' };
const CHOICES = [["auto", "The model decides"], ["required", "It must call one"], ["none", "It may call none"]];
export const TOOL_PROMPTS = ["What is the weather in Oslo and in Lima?", "Where is my order 4711?"];

// Tools as the API expects them. Each may also be declared without the outer object.
export const readTools = (declared) => JSON.parse(declared).map((tool) => (tool.function ? tool : { type: "function", function: tool }));
export const toToolChoice = (choice) => (CHOICES.some(([known]) => known === choice) ? choice : { type: "function", function: { name: choice } });

export function findToolsProblem(declared) {
  if (!declared) return null;
  try {
    const tools = JSON.parse(declared);
    if (!Array.isArray(tools)) return "The tools must be a JSON array of functions, each with a name and parameters.";
    return readTools(declared).every((tool) => tool.function.name) ? null : "Each tool needs a name.";
  } catch (error) {
    return `The tools are not valid JSON: ${error.message}`;
  }
}

export function ToolSettings({ tools, choice }) {
  const names = tools && !findToolsProblem(tools) ? readTools(tools).map((tool) => tool.function.name) : [];
  const add = (name) => {
    const before = tools && !findToolsProblem(tools) ? JSON.parse(tools) : [];
    setQuery({ tools: JSON.stringify([...before, EXAMPLES[name]]) });
  };
  return html`<${Field} label="Tools: functions as a JSON array"><textarea class="mono" rows=${tools ? 6 : 3} spellcheck=${false} value=${pretty(tools)} onChange=${(event) => setQuery({ tools: compact(event.target.value) })}></textarea><//>
    <div class="row s"><span>Add an example:</span>${Object.entries(EXAMPLES).filter(([, tool]) => !names.includes(tool.name)).map(([name]) => html`<button key=${name} type="button" class="link" onClick=${() => add(name)}>${name}</button>`)}</div>
    ${tools ? html`<${Select} label="Choice of tools" value=${choice} options=${[...CHOICES, ...names.map((name) => [name, `It must call ${visible(name)}`])]} onChange=${(value) => setQuery({ tool_choice: value === "auto" ? "" : value })} />` : null}`;
}

// JSON in lines for people, and in one for the address. Text that is not JSON stays as it is.
function reformat(json, indent) {
  try { return JSON.stringify(JSON.parse(json), null, indent); } catch { return json; }
}
const pretty = (json) => reformat(json, 2);
const compact = (json) => reformat(json.trim());

export const ToolCall = ({ call }) => html`<div class="call"><div class="s">Calls <${Name} value=${call.name} /></div><pre tabindex="0">${pretty(call.arguments)}</pre></div>`;

// One result for each call, since all of them go back to the model together.
export function ToolResults({ calls, send }) {
  const [results, setResults] = useState(() => calls.map(({ name }) => RESULTS[name] ?? ""));
  const set = (index) => (event) => setResults(results.map((result, position) => (position === index ? event.target.value : result)));
  return html`<form class="results" onSubmit=${(event) => { event.preventDefault(); send(results); }}>${calls.map(({ name, arguments: given }, index) => html`
    <${Field} key=${index} label=${`Result of ${visible(name)}(${visible(given)})`}><textarea class="mono" rows="2" spellcheck=${false} value=${results[index]} onInput=${set(index)}></textarea><//>`)}
    <div class="row"><button class="btn primary">${calls.length === 1 ? "Send the result" : `Send ${calls.length} results`}</button></div></form>`;
}
