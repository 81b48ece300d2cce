// A form in a dialog. Its fields are data, and its values are checked by the gateway.
import { html, useEffect, useRef, useState } from "../vendor.js";
import { Field } from "./parts.js";

// fields: [{ name, label, kind?, options?, value?, hint?, isRequired?, parse? }]. `save` gets the values by name. Children stand above the fields.
export function FormDialog({ title, fields, save, close, submit = "Save", children }) {
  const dialog = useRef(null);
  const [error, setError] = useState("");
  const [isBusy, setBusy] = useState(false);
  useEffect(() => { dialog.current.showModal(); }, []);
  const send = async (event) => {
    event.preventDefault();
    const values = {};
    for (const { name, parse } of fields) {
      const text = event.currentTarget.elements[name].value.trim();
      if (text !== "") values[name] = parse ? parse(text) : text;
    }
    setBusy(true);
    try {
      await save(values);
      close();
    } catch (failure) {
      setError(failure.message);
      setBusy(false);
    }
  };
  return html`<dialog ref=${dialog} aria-label=${title} onClose=${close}><form onSubmit=${send}><h2>${title}</h2>${children}
    ${fields.map((field) => html`<${Field} key=${field.name} label=${field.label} hint=${field.hint}>${field.options
      ? html`<select name=${field.name}>${field.options.map(([value, text]) => html`<option key=${value} value=${value} selected=${value === field.value}>${text}</option>`)}</select>`
      : html`<input name=${field.name} type=${field.kind ?? "text"} step="any" defaultValue=${field.value ?? ""} required=${field.isRequired} />`}<//>`)}
    ${error ? html`<p class="failure" role="alert">${error}</p>` : null}
    <div class="row"><button class="btn primary" disabled=${isBusy}>${submit}</button><button type="button" class="btn" onClick=${() => dialog.current.close()}>Cancel</button></div></form></dialog>`;
}

// Shows a new key once. The gateway keeps only its digest.
export function NewKeyDialog({ plainKey, close, copy }) {
  const dialog = useRef(null);
  useEffect(() => { dialog.current.showModal(); }, []);
  return html`<dialog ref=${dialog} aria-label="New key" onClose=${close}><h2>The new key</h2>
    <p>It is shown only now. The gateway keeps a digest from which it cannot be read again.</p><pre tabindex="0">${plainKey}</pre>
    <div class="row tail"><button class="btn primary" onClick=${copy}>Copy</button><button class="btn" onClick=${() => dialog.current.close()}>Close</button></div></dialog>`;
}
