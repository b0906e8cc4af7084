// Workers, and all others that receive: what runs and for how long, what failed, what is tried again; paused, resumed.

import { link } from "./address.js";
import { ago, count, duration, number, preview, time, topicName } from "./format.js";
import { Answer, Ask, Table, useNow } from "./parts.jsx";
import { ask, useWatch } from "./server.js";

const sum = (tasks, name) => tasks.reduce((total, each) => total + each[name], 0);
const processOf = ({ host, process }) => `${process} on ${host}`;
const messageLink = (topic, id) => <a href={link(["topics", topic, "messages", id])}>{id}</a>;

export function Workers({ query, rest: [topic, subscription] }) {
  return topic && subscription ? <Tasks topic={topic} subscription={subscription} /> : <Receiving namespace={query.namespace} />;
}

function Receiving({ namespace }) {
  const [receiving] = useWatch([["receiving", namespace ? { namespace } : {}]]);
  const columns = [
    { title: "Subscription", key: "name", wrap: true, show: ({ topic, name, paused }) => <><a href={link(["workers", topic, name])}>{name}</a>{paused && <span class="tag">paused</span>}</> },
    { title: "Topic", key: "topic", wrap: true, show: (row) => <a href={link(["topics", row.topic])}>{topicName(row.topic)}</a> },
    { title: "Tasks", key: "functions", wrap: true },
    { title: "Processes", key: "processes", number },
    { title: "Running", key: "running", show: (row) => (row.tasks.length ? `${number(row.running)} of ${number(row.concurrency)}` : `${number(row.unacknowledged)} handed out`) },
    { title: "Longest for", key: "longest_running_ms", show: (row) => duration(row.longest_running_ms) },
    { title: "Failed", key: "failed", number },
    { title: "Backlog", key: "backlog", number },
    { title: "Died", key: "dead_lettered", show: (row) => (row.dead_lettered ? <a href={link(["letters"], { topic: row.topic })}>{number(row.dead_lettered)}</a> : "0") },
    { title: "", show: (row) => <Pause topic={row.topic} name={row.name} paused={row.paused} /> },
  ];
  const rowOf = ({ topic, subscription, tasks }) => ({
    ...subscription, topic, tasks, id: `${topic} ${subscription.name}`,
    functions: [...new Set(tasks.map((each) => each.task))].join(", ") || "–",
    processes: new Set(tasks.map(processOf)).size,
    running: sum(tasks, "running"), concurrency: sum(tasks, "concurrency"), failed: sum(tasks, "failed"),
  });
  return (
    <>
      <h1>Workers</h1>
      <Answer answer={receiving}>
        {(rows) => <Table name="workers" caption="Workers" columns={columns} rows={rows.map(rowOf)} empty="Nobody receives. duelog worker MODULE:worker --connect DIR starts a worker." />}
      </Answer>
    </>
  );
}

function Tasks({ topic, subscription }) {
  const at = { topic, subscription }, now = useNow();
  const [tasks, retries, figures] = useWatch([["tasks", at], ["retries", at], ["topic_figures", { topic }]]);
  const { paused, backlog } = figures?.result?.subscriptions.find((each) => each.name === subscription) ?? {};
  const by = (tasks, name) => tasks.flatMap((task) => task[name].map((each) => (
    { ...each, process: processOf(task), task: task.task, id: `${each.message_id} ${each.attempt} ${processOf(task)}` }
  )));
  return (
    <>
      <nav class="crumbs" aria-label="Where this is"><a href={link(["workers"])}>Workers</a> <a href={link(["topics", topic])}>{topicName(topic)}</a></nav>
      <div class="title">
        <h1>{subscription}</h1> {paused && <span class="tag">paused</span>}
        {figures?.result && <Pause topic={topic} name={subscription} paused={paused} />}
      </div>
      {backlog > 0 && <p class="quiet">{count(backlog, "message")} due and not acknowledged.</p>}
      <Answer answer={tasks}>
        {(tasks) => (
          <>
            <h2>Processes</h2>
            <Table name={`processes of ${subscription}`} caption="Processes" rows={tasks.map((each) => ({ ...each, id: `${processOf(each)} ${each.since_ms}` }))}
              empty="No worker tells what it does. Other programs may receive." columns={[
                { title: "Worker", key: "worker", wrap: true },
                { title: "Task", key: "task", wrap: true },
                { title: "Process", key: "process", show: processOf },
                { title: "Since", key: "since_ms", time: true },
                { title: "Running", key: "running", show: (row) => `${number(row.running)} of ${number(row.concurrency)}` },
                { title: "Acknowledged", key: "acknowledged", number },
                { title: "Failed", key: "failed", number },
              ]} />
            <h2>Running now</h2>
            <Table name={`running of ${subscription}`} caption="Running now" rows={by(tasks, "attempts").sort((one, other) => one.began_ms - other.began_ms)} empty="Nothing runs." columns={[
              { title: "Message", key: "message_id", show: (row) => <>{messageLink(topic, row.message_id)}{row.hangs && <span class="tag failed">hangs</span>}</> },
              { title: "For", key: "began_ms", show: (row) => duration(Math.max(now - row.began_ms, 0)) },
              { title: "Attempt", key: "attempt", number },
              { title: "Task", key: "task", wrap: true },
              { title: "Process", key: "process" },
            ]} />
            <h2>Last failures</h2>
            <Failures topic={topic} subscription={subscription} rows={by(tasks, "failures").sort((one, other) => other.failed_ms - one.failed_ms)} />
          </>
        )}
      </Answer>
      <h2>Retries to come</h2>
      <Answer answer={retries}>
        {({ messages, complete }) => (
          <>
            {!complete && <p class="quiet">Those among the first messages to come are shown.</p>}
            <Table name={`retries of ${subscription}`} caption="Retries to come" rows={messages} empty="Nothing is tried again." columns={[
              { title: "Due", key: "due_ms", show: (row) => <>{time(row.due_ms)} <small>{ago(row.due_ms)}</small></> },
              { title: "Last failure", key: "failure", wrap: true },
              { title: "Failed", key: "retries", show: (row) => count(row.retries, "time") },
              { title: "Message", key: "message_id", show: (row) => messageLink(topic, row.message_id) },
              { title: "Key", key: "key", wrap: true },
              { title: "Payload", key: "payload", show: (row) => <span class="payload" dir="auto">{preview(row)}</span> },
            ]} />
          </>
        )}
      </Answer>
    </>
  );
}

function Failures({ topic, subscription, rows }) {
  return (
    <Table name={`failures of ${subscription}`} caption="Last failures" rows={rows} empty="Nothing has failed since its workers began." columns={[
      { title: "Failed", key: "failed_ms", show: (row) => ago(row.failed_ms) },
      { title: "Reason", key: "reason", wrap: true, show: (row) => (
        <details class="trace"><summary>{row.reason}</summary><pre tabIndex={0} aria-label={`Traceback of ${row.message_id}`}>{row.traceback}</pre></details>
      ) },
      { title: "Message", key: "message_id", show: (row) => messageLink(topic, row.message_id) },
      { title: "Attempt", key: "attempt", number },
      { title: "Again", key: "again_ms", show: (row) => (row.again_ms == null ? <a href={link(["letters"], { topic })}>dead letter</a> : time(row.again_ms)) },
      { title: "Process", key: "process" },
    ]} />
  );
}

function Pause({ topic, name, paused }) {
  const at = { topic, subscription: name };
  return paused
    ? <Ask label="Resume" name={name} needs="resume" title={`Resume ${name}`} act={() => ask("resume", at)} done="It goes on."><p>Its workers are handed messages again, in all processes.</p></Ask>
    : <Ask label="Pause" name={name} needs="pause" title={`Pause ${name}`} act={() => ask("pause", at)} done="It is paused."><p>Workers of this subscription are handed nothing, in whatever process, until it is resumed; also after a restart. What runs goes on. Nothing is lost.</p></Ask>;
}
