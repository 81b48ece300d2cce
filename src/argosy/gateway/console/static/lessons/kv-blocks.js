// The KV cache as blocks: who uses each, how full it is, and which are kept for later.
import { html } from "../vendor.js";
import { plural } from "../core/format.js";
import { Pill } from "../ui/parts.js";
import { Figure, colorOf } from "./drawing.js";

const WIDTH = 56, HEIGHT = 44, GAP = 6, BLOCK_TOKENS = 8;
const KINDS = { running: "ok", waiting: "warn", ended: "none" };

export function KvBlocks({ frame }) {
  const used = frame.owners.filter((owners) => owners.length).length;
  const shared = frame.owners.filter((owners) => owners.length > 1).length;
  const free = frame.owners.length - used - frame.cached.length;
  const summary = `${plural(used, "block")} in use, ${shared} of them shared; ${frame.cached.length} cached; ${free} free.`;
  return html`<${Figure} label=${`The KV cache: ${summary}`} draw=${(width) => drawBlocks(frame, width)} />
    <p class="s">${summary} A block holds the keys and values of ${BLOCK_TOKENS} tokens. Its number is the request that uses it; the bar is how full it is.</p>
    <ul class="leg">${frame.requests.map(({ number, state, tokens, cached_tokens: cached }) => html`<li key=${number}><${Pill} kind=${KINDS[state]}>Request ${number} ${state}<//> ${plural(tokens, "token")}${cached ? `, ${cached} from shared blocks` : ""}</li>`)}</ul>`;
}

function drawBlocks({ owners, filled, cached }, width) {
  const columns = Math.max(1, Math.floor((width + GAP) / (WIDTH + GAP)));
  const rows = Math.ceil(owners.length / columns);
  const content = owners.map((numbers, block) => {
    const x = (block % columns) * (WIDTH + GAP) + 1, y = Math.floor(block / columns) * (HEIGHT + GAP) + 1;
    const isCached = cached.includes(block);
    const color = numbers.length ? colorOf(numbers[0]) : isCached ? "var(--edge)" : "var(--line)";
    const bar = (WIDTH - 12) * (filled[block] / BLOCK_TOKENS);
    return html`<g key=${block}><rect x=${x} y=${y} width=${WIDTH - 2} height=${HEIGHT - 2} rx="4" fill=${numbers.length ? color : "none"} fill-opacity="0.18"
        stroke=${color} stroke-width=${numbers.length > 1 ? 2.5 : 1} stroke-dasharray=${isCached ? "4 3" : null} />
      <text x=${x + WIDTH / 2 - 1} y=${y + 20} text-anchor="middle" class=${numbers.length ? "strong" : ""}>${numbers.length ? nameRanges(numbers) : isCached ? "cached" : "free"}</text>
      <rect x=${x + 5} y=${y + 30} width=${bar} height="5" fill=${color} /></g>`;
  });
  return { height: rows * (HEIGHT + GAP), content };
}

// "1–3, 5" for 1, 2, 3, 5.
function nameRanges(numbers) {
  const ranges = [];
  for (const number of numbers) {
    const last = ranges.at(-1);
    if (last && last[1] === number - 1) last[1] = number;
    else ranges.push([number, number]);
  }
  return ranges.map(([first, last]) => (first === last ? first : `${first}–${last}`)).join(", ");
}
