// Parts that views are made of: tables that are exported, figures, dialogs that ask once, messages of what was done.

import { createContext } from "preact";
import { useContext, useEffect, useRef, useState } from "preact/hooks";
import { time } from "./format.js";
import { changed } from "./server.js";

/** By operation whether the role may ask it. */
export const May = createContext({});
export const useMay = () => {
  const may = useContext(May);
  return (operation) => Boolean(may[operation]?.allowed);
};

export const Figure = ({ name, value, note, alert }) => (
  <div class={`card figure-card${alert ? " alert" : ""}`}>
    <dt>{name}</dt>
    <dd class="figure">{value}</dd>
    {note && <dd class="quiet">{note}</dd>}
  </div>
);

/** The time, each second. */
export function useNow() {
  const [now, setNow] = useState(Date.now);
  useEffect(() => {
    const timer = setInterval(() => setNow(Date.now()), 1000);
    return () => clearInterval(timer);
  }, []);
  return now;
}

/** How much of a limit is in use; most: 0: there is none. */
export const Gauge = ({ name, used, most, show }) => (
  <label class="gauge"><span>{name}</span> <meter min={0} max={most || 1} high={(most || 1) * 0.8} value={most ? used : 0} /> <span class="figure">{show(used)} of {most ? show(most) : "no limit"}</span></label>
);

/** Show what came, or why nothing did. */
export function Answer({ answer, children }) {
  if (answer?.reason) return <p class="problem" role="alert">{answer.reason}</p>;
  return answer ? children(answer.result) : <p class="quiet" role="status">Asking …</p>;
}

// -- tables ------------------------------------------------------------------------------------------

function save(name, kind, text) {
  const place = URL.createObjectURL(new Blob([text], { type: kind }));
  const anchor = Object.assign(document.createElement("a"), { href: place, download: name });
  anchor.click();
  setTimeout(() => URL.revokeObjectURL(place), 1000);
}

/** A cell of CSV; what a spreadsheet would take for a formula is not. */
function cell(value) {
  let text = value == null ? "" : typeof value === "object" ? JSON.stringify(value) : String(value);
  if (typeof value === "string" && /^[=+\-@\t\r]/.test(text)) text = `'${text}`;
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

export function csv(rows, keys) {
  return [keys, ...rows.map((row) => keys.map((key) => row[key]))].map((line) => line.map(cell).join(",")).join("\r\n") + "\r\n";
}

/**
 * Rows as a table. columns: {title, key, show, number, time, sort}; the key is the field that is exported.
 * all: gives every row for an export, where `rows` are a page of them.
 */
export function Table({ name, caption, rows, columns, sort, onSort, all, empty = "There is none.", actions }) {
  const fields = columns.filter((each) => each.key);
  const give = async (kind) => {
    const found = all ? await all() : rows;
    if (kind === "csv") save(`${name}.csv`, "text/csv", csv(found, fields.map((each) => each.key)));
    else save(`${name}.json`, "application/json", JSON.stringify(found, null, 1));
  };
  return (
    <div class="table">
      <div class="table-head">
        {actions}
        <span class="grow" />
        <button class="plain" onClick={() => give("csv")} aria-label={`${caption} as CSV`}>CSV</button>
        <button class="plain" onClick={() => give("json")} aria-label={`${caption} as JSON`}>JSON</button>
      </div>
      <div class="scroll" tabIndex={0} role="region" aria-label={caption}>
        <table>
          <caption class="hidden">{caption}</caption>
          <thead>
            <tr>
              {columns.map((column) => {
                const sorted = sort?.by === column.sort && column.sort;
                const order = sorted ? (sort.descending ? "descending" : "ascending") : undefined;
                return (
                  <th scope="col" class={column.number ? "number" : ""} aria-sort={order}>
                    {column.sort ? (
                      <button class="sort" onClick={() => onSort(column.sort)}>{column.title}{order && (sort.descending ? " ↓" : " ↑")}</button>
                    ) : column.title || <span class="hidden">Actions</span>}
                  </th>
                );
              })}
            </tr>
          </thead>
          <tbody>
            {rows.map((row) => (
              <tr key={row.id ?? row.name ?? row.message_id ?? row.start_ms}>
                {columns.map((column) => (
                  <td class={column.number ? "number" : !column.title ? "actions" : column.wrap ? "wrap" : ""}>
                    {column.show ? column.show(row) : column.number ? column.number(row[column.key]) : column.time ? time(row[column.key]) : row[column.key]}
                  </td>
                ))}
              </tr>
            ))}
          </tbody>
        </table>
        {!rows.length && <p class="quiet empty">{empty}</p>}
      </div>
    </div>
  );
}

// -- doing -------------------------------------------------------------------------------------------

let tell = () => {};
/** Say for a while what was done, or why it was not. */
export const say = (text, problem = false) => tell({ text, problem });

export function Said() {
  const [found, setFound] = useState(null);
  useEffect(() => {
    let timer;
    tell = (message) => {
      clearTimeout(timer);
      setFound(message);
      timer = setTimeout(() => setFound(null), message.problem ? 20_000 : 6_000);
    };
  }, []);
  return <div class={`said${found?.problem ? " problem" : ""}`} role="status" aria-live="polite">{found?.text}</div>;
}

/** A button that asks once what will be done and lost, with fields where it needs values, and then does it. */
export function Ask({ label, title, children, fields = [], act, danger, done = "Done.", needs, name }) {
  const may = useMay();
  const dialog = useRef(null);
  const [open, setOpen] = useState(false);
  const [busy, setBusy] = useState(false);
  useEffect(() => {
    if (open) dialog.current.showModal();
  }, [open]);
  if (needs && !may(needs)) return null;
  const submit = async (event) => {
    event.preventDefault();
    setBusy(true);
    try {
      const result = await act(Object.fromEntries(new FormData(event.target)));
      changed();
      say(typeof done === "function" ? done(result) : done);
      dialog.current?.close(); // which gives the focus back
    } catch (error) {
      say(error.message, true);
    }
    setBusy(false);
  };
  return (
    <>
      <button class={danger ? "danger" : ""} onClick={() => setOpen(true)} aria-label={name ? `${label} ${name}` : undefined}>{label}</button>
      {open && (
        <dialog ref={dialog} onClose={() => setOpen(false)} aria-label={title}>
          <form onSubmit={submit}>
            <h2>{title}</h2>
            {children}
            {fields.map(({ name, label, kind = "text", value = "", options, help, ...more }) => (
              <label key={name}>
                <span>{label}</span>
                {options ? (
                  <select name={name}>{options.map(([key, text]) => <option value={key} selected={key === value}>{text}</option>)}</select>
                ) : kind === "long" ? (
                  <textarea name={name} rows={5} {...more}>{value}</textarea>
                ) : (
                  <input name={name} type={kind} defaultValue={value} step={kind === "number" ? "any" : undefined} {...more} />
                )}
                {help && <small class="quiet">{help}</small>}
              </label>
            ))}
            <div class="buttons">
              <button type="button" onClick={() => dialog.current.close()}>Leave it</button>
              <button class={danger ? "danger strong" : "strong"} disabled={busy}>{label}</button>
            </div>
          </form>
        </dialog>
      )}
    </>
  );
}
