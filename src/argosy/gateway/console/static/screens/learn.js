// Learn: pictures of the product's own policy code at work, with sliders, step and play.
import { html, useEffect, useRef, useState } from "../vendor.js";
import { may, query as withQuery, useResource } from "../core/api.js";
import { link, route, setQuery } from "../core/router.js";
import { Batching } from "../lessons/batching.js";
import { CircuitBreaker } from "../lessons/circuit-breaker.js";
import { FairQueue } from "../lessons/fair-queue.js";
import { KvBlocks } from "../lessons/kv-blocks.js";
import { Limits } from "../lessons/limits.js";
import { Card, Resource, Select } from "../ui/parts.js";

const LESSONS = [
  { id: "kv-blocks", title: "KV blocks", Picture: KvBlocks, question: "How do requests of different lengths share one KV cache?",
    setting: "kv_memory sets the size of the KV cache of a replica, and prefix_cache: false turns sharing off. Prompts share blocks within one cache domain only.", page: "explanation/routing-and-kv-cache.md" },
  { id: "batching", title: "Batching", Picture: Batching, question: "Why does a server not wait until a batch is complete?",
    setting: "batching: continuous is the default, and max_seqs is the number of places. static and dynamic are for comparison.", page: "reference/fleet-file.md" },
  { id: "fair-queue", title: "Fair queue", Picture: FairQueue, question: "One tenant sends far more than the others. Who is served next?",
    setting: "A project has a tier and a weight. Higher tiers go first; projects of one tier share tokens by weight.", page: "explanation/queueing-and-fairness.md", screen: ["tenants", { tab: "projects" }, "Open the projects"], scope: "organisation" },
  { id: "limits", title: "Limits and budgets", Picture: Limits, question: "When is a request rejected, and when may the client try again?",
    setting: "argosy tenants limits set gives an organisation, a project, a user or a key a limit for a second, minute, hour, day or month.", page: "explanation/limits-and-leases.md", screen: ["tenants", { tab: "limits" }, "Open the limits"], scope: "organisation" },
  { id: "circuit-breaker", title: "Circuit breaker", Picture: CircuitBreaker, question: "A replica fails. How do requests avoid it, and how does it come back?",
    setting: "Three failures in a row open a breaker for 2 s, then 4, 8 and 10 s. Failures of half of the last 20 attempts open it too.", page: "explanation/replica-status.md", screen: ["models", {}, "Open the replicas"], scope: "gateway" },
];
const SPEEDS = [["1", "1 frame per s"], ["2", "2 frames per s"], ["5", "5 frames per s"], ["10", "10 frames per s"]];

export default function Learn() {
  const { parts: [id] } = route.value;
  const lesson = LESSONS.find((one) => one.id === (id ?? LESSONS[0].id));
  return html`<nav class="row" aria-label="Lessons">${LESSONS.map((one) => html`<a key=${one.id} class="btn" href=${link("learn", [one.id])} aria-current=${one === lesson ? "page" : undefined}>${one.title}</a>`)}</nav>
    ${lesson ? html`<${Lesson} key=${lesson.id} lesson=${lesson} />` : html`<${Card} title="There is no such lesson"><p>The address may be wrong. <a href=${link("learn")}>Open the first lesson</a></p><//>`}`;
}

function Lesson({ lesson }) {
  const { at, speed, ...values } = route.value.query;
  const resource = useResource(withQuery(`admin/lessons/${lesson.id}`, values));
  const last = useRef(undefined); // stays while other values are computed, so that sliders keep the focus
  if (resource.data) last.current = resource.data;
  const { setting, page, screen, scope } = lesson;
  const data = resource.data ?? (resource.error ? undefined : last.current);
  return html`<${Card} title=${lesson.question}><${Resource} of=${{ ...resource, data }} height=${360}>${(run) => html`
      <div class="lesson"><div class="side-form">${run.parameters.map((parameter) => html`<${Slider} key=${parameter.name} parameter=${parameter} />`)}
        <button class="btn" onClick=${() => setQuery(Object.fromEntries(run.parameters.map(({ name }) => [name, undefined])))}>Use the defaults</button></div>
      <${Player} run=${run} Picture=${lesson.Picture} /></div>`}<//>
    ${resource.error?.status === 400 ? html`<p><a href=${link("learn", [lesson.id])}>Use the defaults</a></p>` : null}<//>
    <${Card} title="In Argosy"><p>${setting} <span class="s">See <code>docs/${page}</code>.</span></p>${screen && may("viewer", scope) ? html`<a href=${link(screen[0], [], screen[1])}>${screen[2]}</a>` : null}<//>`;
}

function Slider({ parameter }) {
  const { name, label, unit, value, minimum, maximum, step } = parameter;
  const [moved, setMoved] = useState(value);
  useEffect(() => setMoved(value), [value]);
  return html`<label class="field"><span>${label}: <b>${moved}</b> ${unit}</span>
    <input type="range" min=${minimum} max=${maximum} step=${step} value=${moved} aria-valuetext=${`${moved} ${unit}`}
      onInput=${(event) => setMoved(Number(event.target.value))} onChange=${(event) => setQuery({ [name]: event.target.value })} /></label>`;
}

// Plays the frames. The address has the position where it stands still, since browsers limit how often it may change.
function Player({ run, Picture }) {
  const { query } = route.value;
  const end = run.frames.length - 1;
  const speed = SPEEDS.some(([value]) => value === query.speed) ? query.speed : "2";
  const [playedTo, setPlayedTo] = useState(null); // null while it stands still
  const isPlaying = playedTo !== null;
  const index = Math.min(end, Math.max(0, isPlaying ? playedTo : Math.floor(Number(query.at)) || 0));
  const go = (next) => { setPlayedTo(null); setQuery({ at: Math.min(end, Math.max(0, next)) || undefined }); };
  useEffect(() => {
    if (!isPlaying) return undefined;
    if (index >= end) { go(end); return undefined; }
    const timer = setTimeout(() => setPlayedTo(index + 1), 1000 / Number(speed));
    return () => clearTimeout(timer);
  }, [isPlaying, index, end, speed]);
  const values = Object.fromEntries(run.parameters.map(({ name, value }) => [name, value]));
  return html`<div class="side-form"><div class="row">
      <button class="btn" onClick=${() => go(0)} disabled=${index === 0 && !isPlaying}>Start</button>
      <button class="btn" onClick=${() => go(index - 1)} disabled=${index === 0}>Back</button>
      <button class="btn primary" onClick=${() => (isPlaying ? go(index) : setPlayedTo(index >= end ? 0 : index))}>${isPlaying ? "Pause" : "Play"}</button>
      <button class="btn" onClick=${() => go(index + 1)} disabled=${index === end}>Step</button>
      <${Select} label="Speed" value=${speed} options=${SPEEDS} onChange=${(value) => setQuery({ speed: value })} /></div>
    <label class="field"><span>Frame <b>${index + 1}</b> of ${end + 1}</span>
      <input type="range" min="0" max=${end} value=${index} aria-valuetext=${`frame ${index + 1} of ${end + 1}`} onInput=${(event) => go(Number(event.target.value))} /></label>
    <p class="says" role="status" aria-live=${isPlaying ? "off" : "polite"}>${run.frames[index].text}</p>
    <${Picture} frame=${run.frames[index]} frames=${run.frames} index=${index} values=${values} />
    ${index === end ? html`<p><b>Result.</b> ${run.result}</p>` : null}</div>`;
}
