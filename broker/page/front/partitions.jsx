// Time partitions as a calendar, why one is still there, and jobs that read the whole store.

import { useEffect, useState } from "preact/hooks";
import { link } from "./address.js";
import { bytes, count, day, number, short, time, topicName } from "./format.js";
import { Answer, Ask, Figure, Table, useMay } from "./parts.jsx";
import { ask, jobs, useWatch } from "./server.js";

const DAY = 86_400_000;
const named = new Intl.DateTimeFormat("en-GB", { month: "long", year: "numeric", timeZone: "UTC" });

function months(rows) {
  const found = new Map();
  for (const row of rows) {
    const title = named.format(row.start_ms);
    found.set(title, [...(found.get(title) ?? []), row]);
  }
  return [...found];
}

function Tile({ row, most, chosen }) {
  const daily = row.end_ms - row.start_ms === DAY;
  const level = row.pending ? Math.ceil((Math.log1p(row.pending) / Math.log1p(most)) * 4) : 0;
  const label = daily ? String(new Date(row.start_ms).getUTCDate()) : time(row.start_ms);
  return (
    <a class={`tile ${row.state} level-${level}`} href={link(["partitions", row.start_ms])} aria-current={chosen ? "true" : undefined} title={`${day(row.start_ms)}, ${row.state}: ${count(row.pending, "message")} pending, ${bytes(row.disk_bytes)}`}>
      <span>{label}</span><b>{row.state === "closed" ? "held" : <>{short(row.pending, 1000)}<span class="hidden"> pending, {row.state}</span></>}</b>
    </a>
  );
}

export function Partitions({ rest: [chosen] }) {
  const [calendar] = useWatch([["calendar", {}]]);
  return (
    <>
      <h1>Partitions</h1>
      <Answer answer={calendar}>
        {(rows) => {
          const most = Math.max(1, ...rows.map((row) => row.pending));
          const one = rows.find((row) => String(row.start_ms) === chosen);
          return (
            <>
              <p class="quiet">Days begin at midnight UTC. Darker: more is pending. Closed: all has fired, and somebody still needs it.</p>
              {chosen && (one ? <One row={one} /> : <p class="quiet">This partition is not there any more: all of it is acknowledged.</p>)}
              <div class="months">
                {months(rows).map(([title, days]) => (
                  <section class="card" key={title}>
                    <h2>{title} <span class="figure quiet">{short(days.reduce((sum, row) => sum + row.pending, 0))}</span></h2>
                    <div class={`tiles${days[0].end_ms - days[0].start_ms === DAY ? " days" : ""}`}>
                      {days[0].end_ms - days[0].start_ms === DAY && Array.from({ length: (new Date(days[0].start_ms).getUTCDay() + 6) % 7 }, () => <span />)}
                      {days.map((row, at) => [
                        ...gap(days[at - 1], row),
                        <Tile key={row.start_ms} row={row} most={most} chosen={row === one} />,
                      ])}
                    </div>
                  </section>
                ))}
              </div>
              {!rows.length && <p class="quiet">There are none: nothing was ever sent for later.</p>}
              <details>
                <summary>As a table</summary>
                <Table name="partitions" caption="Partitions" rows={rows} columns={[
                  { title: "From", key: "start_ms", show: (row) => <a href={link(["partitions", row.start_ms])}>{day(row.start_ms)}</a> },
                  { title: "State", key: "state" }, { title: "Topics", key: "topics", number },
                  { title: "Messages", key: "messages", number }, { title: "Pending", key: "pending", number },
                  { title: "Held by topics", key: "holders", number }, { title: "Disk", key: "disk_bytes", number: bytes },
                  { title: "Generation", key: "generation", number },
                ]} />
              </details>
            </>
          );
        }}
      </Answer>
      <Jobs />
    </>
  );
}

/** Empty places for days that have no partition. */
function gap(before, row) {
  const missing = before && row.end_ms - row.start_ms === DAY ? Math.round((row.start_ms - before.end_ms) / DAY) : 0;
  return Array.from({ length: missing }, () => <span class="tile none" aria-hidden="true">{""}</span>);
}

function One({ row }) {
  const [kept] = useWatch([["kept_by", { start_ms: row.start_ms }]]);
  return (
    <section class="card">
      <h2>{row.end_ms - row.start_ms === DAY ? day(row.start_ms) : time(row.start_ms)} <span class={`tag ${row.state}`}>{row.state}</span></h2>
      <dl class="figures">
        <Figure name="Pending" value={number(row.pending)} note={`of ${count(row.messages, "message")}`} />
        <Figure name="Topics" value={number(row.topics)} note={row.state === "closed" ? `held by ${number(row.holders)}` : ""} />
        <Figure name="Disk" value={bytes(row.disk_bytes)} note={row.generation > 1 ? `generation ${row.generation}` : ""} />
      </dl>
      <h3>Why it is there</h3>
      <Answer answer={kept}>
        {(reasons) => (
          <ul class="reasons">
            {reasons.slice(0, 50).map((each) => (
              <li>
                {each.topic && <><a href={link(["topics", each.topic])}>{topicName(each.topic)}</a>{each.subscription && <>, subscription <b>{each.subscription}</b></>}: </>}
                {each.explanation}
              </li>
            ))}
            {reasons.length > 50 && <li class="quiet">and {number(reasons.length - 50)} more</li>}
          </ul>
        )}
      </Answer>
    </section>
  );
}

const KINDS = { check: "Check", audit: "Audit", compaction: "Compact", snapshots: "List snapshots" };

function Jobs() {
  const may = useMay()("tick");
  const [found, setFound] = useState([]);
  const [one, setOne] = useState(null);
  const look = () => jobs.all().then(setFound, () => {});
  const running = found.some((each) => each.state === "running");
  useEffect(() => void (may && look()), [may]);
  useEffect(() => {
    if (!running) return;
    const timer = setInterval(look, 1000);
    return () => clearInterval(timer);
  }, [running]);
  if (!may) return null;
  const told = { check: "It reads the whole store and changes nothing.", audit: "It reads the whole store and changes nothing.",
                 compaction: "It rewrites closed partitions of which much is dead. Nothing is lost; it can be cancelled.", snapshots: "It reads what was saved." };
  const columns = [
    { title: "Job", key: "kind", show: (row) => KINDS[row.kind] },
    { title: "State", key: "state", show: (row) => <><span class={`tag ${row.state}`}>{row.state}</span> {row.reason}</> },
    { title: "Started", key: "startedMs", time: true },
    { title: "Ended", key: "endedMs", time: true },
    { title: "", show: (row) => row.state === "running"
      ? <Ask label="Cancel" name={`job ${row.id}`} danger title="Cancel the job" act={() => jobs.cancel(row.id).then(look)}><p>What it has done so far stays.</p></Ask>
      : row.state === "done" && <button onClick={() => jobs.one(row.id).then(setOne)} aria-label={`Result of job ${row.id}`}>Result</button> },
  ];
  return (
    <section>
      <h2>Jobs</h2>
      <Table name="jobs" caption="Jobs" rows={[...found].reverse()} columns={columns} empty="None was started."
        actions={Object.entries(KINDS).map(([kind, label]) => (
          <Ask key={kind} label={label} title={`${label}?`} act={() => jobs.start(kind, {}).then(look)} done="It has begun."><p>{told[kind]}</p></Ask>
        ))} />
      {one && <section class="card"><h3>Result of {KINDS[one.kind].toLowerCase()}</h3>
        {one.result.length ? <pre tabIndex={0} aria-label="Result">{one.result.map((each) => JSON.stringify(each, null, 1)).join("\n")}</pre> : <p>Nothing was found.</p>}</section>}
    </section>
  );
}
