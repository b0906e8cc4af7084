// Time partitions as a calendar, why one is still there, and jobs that read the whole store.

import { useEffect, useRef, useState } from "preact/hooks";
import { link } from "./address.js";
import { ago, bytes, count, day, duration, number, short, time, tiny, topicName } from "./format.js";
import { Counting } from "./overview.jsx";
import { Answer, Ask, Figure, Table, say, useMay } from "./parts.jsx";
import { ask, useWatch } from "./server.js";

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
    <a class={`tile ${row.state} level-${level}`} href={link(["partitions", row.start_ms])} aria-current={chosen ? "true" : undefined} title={`${day(row.start_ms)}, ${row.state}: ${count(row.pending, "message")} pending, ${bytes(row.disk_bytes)}${row.away_bytes ? `, ${bytes(row.away_bytes)} in the copy alone` : ""}`}>
      <span>{label}</span><b>{row.state === "closed" ? "held" : <>{tiny(row.pending)}<span class="hidden"> pending, {row.state}</span></>}</b>
    </a>
  );
}

export function Partitions({ rest: [chosen], query: { job } }) {
  const [calendar, overview] = useWatch([["calendar", {}], ["overview", {}]]);
  return (
    <>
      <h1>Partitions</h1>
      {overview?.result && <Counting complete={overview.result.complete} />}
      <Answer answer={calendar}>
        {(rows) => {
          const fired = rows.map((row) => ({ ...row, fired: row.messages - row.pending }));
          const most = Math.max(1, ...rows.map((row) => row.pending));
          const one = rows.find((row) => String(row.start_ms) === chosen);
          return (
            <>
              <p class="quiet">Days begin at midnight UTC. Darker: more is pending. Closed: all has fired, and somebody still needs it.</p>
              {chosen && (one ? <One row={one} /> : <p class="quiet">{overview?.result?.complete === false ? "This partition is not counted yet." : "This partition is not there any more: all of it is acknowledged."}</p>)}
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
              {!rows.length && overview?.result?.complete && <p class="quiet">There are none: nothing was ever sent for later.</p>}
              <details>
                <summary>As a table</summary>
                <Table name="partitions" caption="Partitions" rows={fired} columns={[
                  { title: "From", key: "start_ms", show: (row) => <a href={link(["partitions", row.start_ms])}>{day(row.start_ms)}</a> },
                  { title: "State", key: "state" }, { title: "Topics", key: "topics", number },
                  { title: "Messages", key: "messages", number }, { title: "Pending", key: "pending", number }, { title: "Fired or cancelled", key: "fired", number },
                  { title: "Held by topics", key: "holders", number }, { title: "Disk", key: "disk_bytes", number: bytes }, { title: "In the copy", key: "away_bytes", number: bytes },
                  { title: "Generation", key: "generation", number },
                ]} />
              </details>
            </>
          );
        }}
      </Answer>
      <Jobs chosen={job} />
    </>
  );
}

/** Empty places for days that have no partition. */
function gap(before, row) {
  const missing = before && row.end_ms - row.start_ms === DAY ? Math.round((row.start_ms - before.end_ms) / DAY) : 0;
  return Array.from({ length: missing }, () => <span class="tile none" aria-hidden="true">{""}</span>);
}

function One({ row }) {
  const at = { start_ms: row.start_ms };
  const [kept, saved] = useWatch([["kept_by", at], ["snapshots", at]]);
  return (
    <section class="card">
      <h2>{row.end_ms - row.start_ms === DAY ? day(row.start_ms) : time(row.start_ms)} <span class={`tag ${row.state}`}>{row.state}</span></h2>
      <dl class="figures">
        <Figure name="Pending" value={number(row.pending)} note={`of ${count(row.messages, "message")}`} />
        <Figure name="Fired" value={number(row.messages - row.pending)} note="or cancelled" />
        <Figure name="Topics" value={number(row.topics)} note={row.state === "closed" ? `held by ${number(row.holders)}` : ""} />
        <Figure name="Disk" value={bytes(row.disk_bytes)} note={row.away_bytes ? `${bytes(row.away_bytes)} in the copy alone` : row.generation > 1 ? `generation ${row.generation}` : ""} />
        {saved?.result && <Figure name="Snapshots" value={row.state === "current" || saved.result.saved ? `${number(saved.result.saved)} of ${number(saved.result.logs)}` : "none"} note={snapshotNote(row, saved.result)} />}
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

function snapshotNote({ state }, { loaded, unsaved, stored_bytes, newest_ms }) {
  if (state === "closed") return "none is needed: all has fired";
  if (!loaded && newest_ms == null) return "not in memory yet: nothing to save";
  return [newest_ms != null && `saved ${ago(newest_ms)}, ${bytes(stored_bytes)}`, `a start reads ${count(unsaved, "message")}${newest_ms != null ? " more" : ""}`].filter(Boolean).join("; ");
}

const KINDS = { check: "Check", audit: "Audit", compaction: "Compact" };
const TOLD = {
  check: "It reads the whole store and changes nothing.",
  audit: "It reads the whole store and changes nothing: a report of what is kept, what holds it, and what is wrong.",
  compaction: "It rewrites closed partitions of which much is dead: cancelled, or acknowledged by every subscription. What it drops cannot be gone back to by seeking. It can be cancelled.",
};

function Progress({ row: { id, done, total } }) {
  const percent = total ? Math.floor((100 * done) / total) : null;
  return <><progress max="100" value={percent ?? undefined} aria-label={`Progress of job ${id}`} /> <span class="figure">{percent == null ? "begun" : `${percent} %`}</span></>;
}

function Jobs({ chosen }) {
  const may = useMay();
  const [jobs] = useWatch([["jobs", {}]]);
  if (!may("jobs")) return null;
  const columns = [
    { title: "Job", key: "kind", show: (row) => KINDS[row.kind] ?? row.kind },
    { title: "State", key: "state", wrap: true, show: (row) => row.state === "running" ? <Progress row={row} /> : <><span class={`tag ${row.state}`}>{row.state}</span> {row.reason}</> },
    { title: "Started", key: "started_ms", time: true },
    { title: "Took", key: "ended_ms", show: (row) => (row.ended_ms ? duration(row.ended_ms - row.started_ms) : "") },
    { title: "", show: (row) => row.state === "running"
      ? <Ask label="Cancel" name={`job ${row.id}`} danger needs="cancel_job" title="Cancel the job" act={() => ask("cancel_job", { job_id: row.id })} done="It is cancelled."><p>What it has done so far stays.</p></Ask>
      : row.state === "done" && <a class="button" href={link(["partitions"], { job: row.id })} aria-label={`Result of job ${row.id}`}>Result</a> },
  ];
  return (
    <section>
      <h2>Jobs</h2>
      <Answer answer={jobs}>
        {(rows) => (
          <>
            <Ends rows={rows} />
            <Table name="jobs" caption="Jobs" rows={[...rows].reverse()} columns={columns} empty="None was started since the store was opened."
              actions={<>
                {Object.entries(KINDS).map(([kind, label]) => (
                  <Ask key={kind} label={label} needs="start_job" title={`${label}?`} done="It has begun."
                    act={() => ask("start_job", { kind, options: kind === "audit" ? { html: true } : {} })}><p>{TOLD[kind]}</p></Ask>
                ))}
                <Ask label="Save snapshots" needs="save_snapshots" title="Save snapshots?" act={() => ask("save_snapshots")} done={(count_) => `${count(count_, "snapshot")} saved.`}>
                  <p>Delay indexes of which the next start would have to read much are saved now. The store does so by itself from time to time.</p>
                </Ask>
              </>} />
          </>
        )}
      </Answer>
      {chosen && <Result key={chosen} id={Number(chosen)} />}
    </section>
  );
}

/** Say that a job has ended, once. */
function Ends({ rows }) {
  const before = useRef(new Map());
  useEffect(() => {
    for (const { id, kind, state, reason } of rows) {
      if (before.current.get(id) === "running" && state !== "running")
        say(`${KINDS[kind] ?? kind}: ${state}${reason ? `, ${reason}` : ""}`, state === "failed");
      before.current.set(id, state);
    }
  }, [rows]);
  return null;
}

function Result({ id }) {
  const [answer, setAnswer] = useState();
  useEffect(() => void ask("job", { job_id: id }).then((result) => setAnswer({ result }), (error) => setAnswer({ reason: error.message })), [id]);
  return (
    <section class="card">
      <h3>Result of job {id}</h3>
      <Answer answer={answer}>
        {({ kind, state, result }) =>
          typeof result === "string" ? <Report html={result} />
          : result === null ? <p>It is {state}: there is no result.</p>
          : kind === "check" ? <Table name="findings" caption="Findings" rows={result} empty="Nothing is wrong." columns={[
              { title: "Severity", key: "severity" }, { title: "Finding", key: "code" }, { title: "Where", key: "address", wrap: true }, { title: "What", key: "message", wrap: true }]} />
          : <Table name="compacted" caption="Compacted partitions" rows={result.flatMap((each) => each.partitions ?? [])} empty="No closed partition has enough to drop." columns={[
              { title: "Partition", key: "partition" }, { title: "Messages", key: "messages", number }, { title: "Dead", key: "dead_messages", number },
              { title: "Before", key: "file_bytes", number: bytes }, { title: "After", key: "file_bytes_after", number: bytes },
              { title: "Outcome", key: "outcome", show: (row) => `${row.outcome} ${row.reason}` }]} />}
      </Answer>
    </section>
  );
}

/** A page that the store has made, in a frame of a policy of its own: no script, nothing loaded. */
const Report = ({ html }) => (
  <iframe class="report" title="Audit" src="page/report.html" sandbox="allow-same-origin" tabIndex={0}
    onLoad={(event) => (event.target.contentDocument.documentElement.innerHTML = html)} />
);
