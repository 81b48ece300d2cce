// What of the declared fleet needs attention: the problems that its status names, each with one action.
import { html } from "../vendor.js";
import { shortDigests } from "../core/format.js";
import { link } from "../core/router.js";

// Severities by mark, colour and word, most urgent first.
const SEVERITIES = { page: ["bad", "Page"], ticket: ["warn", "Ticket"], note: ["none", "Note"] };
const ORDER = Object.keys(SEVERITIES);

export function attentionItem(severity, text, href, action) {
  const [kind, word] = SEVERITIES[severity];
  return { rank: ORDER.indexOf(severity), kind, word, text, href, action };
}

export function findFleetItems(fleet) {
  const models = new Map((fleet?.pools ?? []).map(({ pool, model }) => [pool, model]));
  return (fleet?.problems ?? []).map((problem) => {
    const { kind, severity, pool, replica } = problem;
    const model = models.get(pool);
    const item = (href, action) => attentionItem(severity, html`${shortDigests(problem.text)}`, href, action);
    if (kind === "store") return item(link("settings"), "Open the doctor");
    if (kind === "rollout_waits") return item(link("models", [model]), "Decide");
    if (replica) return item(link("models", model ? [model] : [], { replica }), "Open the replica");
    return model ? item(link("models", [model]), "Open the pool") : item(link("events"), "See the events");
  });
}
