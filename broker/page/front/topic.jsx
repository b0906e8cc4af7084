// One topic: when its messages are due, who receives them, what it sends by itself, what is in force for it.

import { link } from "./address.js";
import { ago, bytes, count, day, duration, number, time, topicName } from "./format.js";
import { SendOne } from "./messages.jsx";
import { Timelines, useTimelines } from "./overview.jsx";
import { Answer, Ask, Figure, Table } from "./parts.jsx";
import { ask, useWatch } from "./server.js";

export function Topic({ name }) {
  const questions = useTimelines(name);
  const [figures, schedules, policies, ...answers] = useWatch([
    ["topic_figures", { topic: name }], ["schedules", { topic: name }], ["effective", { topic: name }], ...questions,
  ]);
  return (
    <>
      <nav class="crumbs" aria-label="Where this is"><a href={link(["topics"])}>Topics</a></nav>
      <div class="title">
        <h1>{topicName(name)}</h1>
        <a class="button" href={link(["topics", name, "messages"])}>Messages</a>
        <SendOne topic={name} />
        <Ask label="Delete" name={topicName(name)} danger needs="delete_topic" title={`Delete ${topicName(name)}`}
          act={() => ask("delete_topic", { topic: name }).then(() => (location.hash = link(["topics"])))} done="It is deleted.">
          <p>The topic goes with its subscriptions, schedules, and {figures?.result ? count(figures.result.pending, "pending message") : "all pending messages"}. This cannot be undone. It is refused while somebody uses it.</p>
        </Ask>
      </div>
      <Answer answer={figures}>
        {(found) => (
          <dl class="figures">
            <Figure name="Pending" value={number(found.pending)} />
            <Figure name="Backlog" value={number(found.subscriptions.reduce((sum, each) => sum + each.backlog, 0))} />
            <Figure name="Sent" value={number(found.sent)} note="since the start" />
            <Figure name="Main log" value={bytes(found.stored_bytes)} note={`${count(found.entries, "entry").replace("entrys", "entries")} in ${count(found.ledgers, "ledger")}`} />
            <Figure name="Delay index" value={bytes(found.index_bytes)} note="in memory" />
          </dl>
        )}
      </Answer>
      <Timelines answers={answers} questions={questions} />
      <h2>Subscriptions</h2>
      <Answer answer={figures}>{({ subscriptions }) => <Subscriptions topic={name} rows={subscriptions} />}</Answer>
      <h2>Schedules</h2>
      <Answer answer={schedules}>{({ items }) => <Schedules topic={name} rows={items} />}</Answer>
      <h2>Policies</h2>
      <Answer answer={policies}>{(found) => <Policies topic={name} {...found} />}</Answer>
    </>
  );
}

function Subscriptions({ topic, rows }) {
  const columns = [
    { title: "Subscription", key: "name", wrap: true },
    { title: "Type", key: "type", show: ({ type, paused, fetching_ms }) => <>{type ?? "–"}{paused && <span class="tag">paused</span>}{fetching_ms != null && <span class="tag" title={`${day(fetching_ms)} comes from the copy`}>fetching</span>}</> },
    { title: "Consumers", key: "consumers", number },
    { title: "Backlog", key: "backlog", number },
    { title: "Handed out", key: "unacknowledged", number },
    { title: "Oldest due for", key: "oldest_unacknowledged_ms", show: (row) => (row.backlog ? duration(row.oldest_unacknowledged_ms) : "–") },
    { title: "Redelivered", key: "redelivered", number },
    { title: "Dead", key: "dead_lettered", number },
    { title: "", show: (row) => <Actions topic={topic} row={row} /> },
  ];
  return (
    <Table name={`subscriptions of ${topicName(topic)}`} caption="Subscriptions" rows={rows} columns={columns}
      empty="Nobody subscribes: what falls due is dropped after a while."
      actions={<Ask label="Subscribe" title="Create a subscription" needs="create_subscription"
        fields={[{ name: "subscription", label: "Name", required: true },
                 { name: "position", label: "Begins with", options: [["latest", "what comes from now on"], ["earliest", "the oldest message that is kept"]] }]}
        act={(given) => ask("create_subscription", { topic, ...given })} done="The subscription is there." />} />
  );
}

function Actions({ topic, row }) {
  const subscription = row.name, at = { topic, subscription };
  const waiting = `${count(row.backlog, "message")} of its backlog`;
  return (
    <span class="buttons">
      {row.paused
        ? <Ask label="Resume" name={subscription} needs="resume" title={`Resume ${subscription}`} act={() => ask("resume", at)} done="It is handed messages again."><p>Consumers are handed messages again.</p></Ask>
        : <Ask label="Pause" name={subscription} needs="pause" title={`Pause ${subscription}`} act={() => ask("pause", at)} done="It is paused."><p>Consumers are handed nothing until it is resumed. Nothing is lost.</p></Ask>}
      <Ask label="Skip" name={subscription} danger needs="skip" title={`Skip messages of ${subscription}`}
        fields={[{ name: "count", label: "How many, the oldest first", kind: "number", min: 1, value: row.backlog || 1, required: true }]}
        act={({ count: many }) => ask("skip", { ...at, count: Number(many) })} done={(done) => `${count(done, "message")} skipped.`}>
        <p>They count as acknowledged: this subscription never receives them. It has {waiting}.</p>
      </Ask>
      <Ask label="Expire" name={subscription} danger needs="expire" title={`Expire messages of ${subscription}`}
        fields={[{ name: "older", label: "Due for longer than, in seconds", kind: "number", min: 0, value: 86400, required: true }]}
        act={({ older }) => ask("expire", { ...at, older_than: Number(older) })} done={(done) => `${count(done, "message")} expired.`}>
        <p>They count as acknowledged: this subscription never receives them. It has {waiting}.</p>
      </Ask>
      <Ask label="Seek" name={subscription} danger needs="seek" title={`Move ${subscription}`}
        fields={[{ name: "to", label: "To", options: [["earliest", "the oldest message that is kept"], ["latest", "the end: nothing of the backlog"], ["due", "the first due at or after"]] },
                 { name: "at", label: "That time, for the last of these", kind: "datetime-local" }]}
        act={({ to, at: moment }) => ask("seek", { ...at, to: to === "due" ? { due_ms: new Date(moment).getTime() } : to })} done={(to) => `It stands at ${to}.`}>
        <p>Back: messages come again that were acknowledged. Ahead: it never receives what lies between. It has {waiting}.</p>
      </Ask>
      <Ask label="Unsubscribe" name={subscription} danger needs="delete_subscription" title={`Delete ${subscription}`}
        act={() => ask("delete_subscription", at)} done="It is deleted.">
        <p>The subscription goes, with its place in the topic: {waiting} {row.backlog === 1 ? "is" : "are"} lost to it, and what is pending never comes to it.</p>
      </Ask>
    </span>
  );
}

function Schedules({ topic, rows }) {
  const columns = [
    { title: "Schedule", key: "name", wrap: true },
    { title: "When", key: "cron", show: (row) => row.cron ?? `every ${duration(row.interval_ms)}` },
    { title: "Zone", key: "timezone" },
    { title: "Next", key: "next_due_ms", show: (row) => (row.paused ? <span class="tag">paused</span> : time(row.next_due_ms)) },
    { title: "", show: ({ name, paused }) => (
      <span class="buttons">
        {paused
          ? <Ask label="Resume" name={name} needs="resume_schedule" title={`Resume ${name}`} act={() => ask("resume_schedule", { topic, name })} done="It goes on."><p>It goes on with the first time after now.</p></Ask>
          : <Ask label="Pause" name={name} needs="pause_schedule" title={`Pause ${name}`} act={() => ask("pause_schedule", { topic, name })} done="It is paused."><p>Its pending message is taken back, until it is resumed.</p></Ask>}
        <Ask label="Remove" name={name} danger needs="remove_schedule" title={`Remove ${name}`} act={() => ask("remove_schedule", { topic, name })} done="It is removed."><p>Its pending message is taken back, and none comes any more.</p></Ask>
      </span>
    ) },
  ];
  return <Table name={`schedules of ${topicName(topic)}`} caption="Schedules" rows={rows} columns={columns} empty="It sends nothing by itself." />;
}

function Policies({ topic, values, set_at }) {
  const rows = Object.entries(values).map(([name, value]) => ({ name, value, set_at: set_at[name] ?? "" }));
  const show = (name, value) => (value == null ? "–" : name.endsWith("_ms") && value ? `${number(value)} ms (${duration(value)})` : typeof value === "number" ? number(value) : String(value));
  const columns = [
    { title: "Policy", key: "name" },
    { title: "In force", key: "value", show: (row) => show(row.name, row.value) },
    { title: "Set at", key: "set_at" },
    { title: "", show: ({ name, value }) => (
      <Ask label="Change" name={name} needs="update_policies" title={`Change ${name} of this topic`} done="It is in force."
        fields={[typeof value === "boolean"
          ? { name: "value", label: "Value", value: String(value), options: [["true", "yes"], ["false", "no"], ["", "as of the namespace or the store"]] }
          : { name: "value", label: "Value; empty: as of the namespace or the store", value: value ?? "" }]}
        act={({ value: text }) => ask("update_policies", { topic, values: { [name]: text === "" ? null : text === "true" ? true : text === "false" ? false : Number.isNaN(Number(text)) ? text : Number(text) } })}>
        <p>In force at once: for what is sent from now on, for its subscriptions, and for what retention keeps.</p>
      </Ask>
    ) },
  ];
  return <Table name={`policies of ${topicName(topic)}`} caption="Policies" rows={rows} columns={columns} />;
}
