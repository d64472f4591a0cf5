// BullMQ on Node: jobs with a delay, one worker with concurrency 100, deduplication; nothing kept of finished jobs.
// It is copied beside its node_modules and speaks as speak.py does: one JSON object a line.
import { createInterface } from "node:readline";
import { performance } from "node:perf_hooks";
import { Redis } from "ioredis";
import { Queue, Worker } from "bullmq";

const { hostname: host, port } = new URL(process.argv[2]);
const connection = new Redis({ host, port: Number(port), maxRetriesPerRequest: null });
const gone = { removeOnComplete: true, removeOnFail: true };
const BATCH = 500;
const sleep = (seconds) => new Promise((done) => setTimeout(done, seconds * 1000));
const cpu = () => { const { user, system } = process.cpuUsage(); return (user + system) / 1e6; };
const now = () => performance.timeOrigin + performance.now();
const payload = (item) =>
  ({ item, name: "one of many things to do", price: 19.99, tags: ["a", "b"], at: 1700000000 });

async function timed(ops, work) {
  const [began, spent] = [performance.now(), cpu()];
  await work();
  return { ops, seconds: (performance.now() - began) / 1000, cpu: cpu() - spent };
}

async function withQueue(tag, work) {
  const queue = new Queue(tag, { connection });
  await queue.waitUntilReady();
  try { return await work(queue); } finally { await queue.close(); }
}

function tally(wanted) {
  const seen = { n: 0, late: [] };
  seen.done = new Promise((resolve) => {
    seen.one = (late) => {
      if (seen.n++ === 0) [seen.began, seen.cpu] = [performance.now(), cpu()];
      if (late !== undefined) seen.late.push(late);
      if (seen.n === wanted)
        resolve({ ops: wanted, seconds: (performance.now() - seen.began) / 1000, cpu: cpu() - seen.cpu });
    };
  });
  return seen;
}

async function worked(tag, seen, late, meanwhile = async () => {}) {
  const handle = async (job) => seen.one(late ? now() - job.data.due : undefined);
  const worker = new Worker(tag, handle, { connection, concurrency: 100, ...gone });
  await worker.waitUntilReady();
  await meanwhile();
  const patience = sleep(40).then(() => ({ error: `only ${seen.n} were handled`, ops: 0 }));
  try { return await Promise.race([seen.done, patience]); } finally { await worker.close(true); }
}

function inBulk(queue, n, jobOf, atOnce = 1) {
  let next = 0;
  const sending = async () => {
    for (let start = next; start < n; start = next) {
      next += BATCH;
      const numbers = Array.from({ length: Math.min(BATCH, n - start) }, (_, i) => start + i);
      await queue.addBulk(numbers.map(jobOf));
    }
  };
  return timed(n, () => Promise.all(Array.from({ length: atOnce }, sending)));
}

const deduplication = {
  first: (id) => ({ id }),
  last: (id) => ({ id, ttl: 600_000, extend: true, replace: true }),
};

const steps = {
  enqueue: ({ tag, n, delay }) => withQueue(tag, (queue) => timed(n, async () => {
    for (let i = 0; i < n; i++) await queue.add("work", payload(i), { delay: delay * 1000, ...gone });
  })),
  enqueue_many: ({ tag, n, delay }) => withQueue(tag, (queue) =>
    inBulk(queue, n, (i) => ({ name: "work", data: payload(i), opts: { delay: delay * 1000, ...gone } }))),
  drain: async ({ tag, n, wait }) => { await sleep(wait); return worked(tag, tally(n), false); },
  steady: ({ tag, rate, seconds, delay }) => withQueue(tag, async (queue) => {
    const seen = tally(rate * seconds);
    const answer = await worked(tag, seen, true, async () => {
      const began = now();
      for (let i = 0; i < rate * seconds; i++) {
        const ahead = began + (i / rate) * 1000 - now();
        if (ahead > 0) await sleep(ahead / 1000);
        await queue.add("work", { due: now() + delay * 1000 }, { delay: delay * 1000, ...gone });
      }
    });
    const late = seen.late.sort((a, b) => a - b);
    const at = (share) => late[Math.min(late.length - 1, Math.floor(late.length * share))];
    return { ...answer, p50: at(0.5), p99: at(0.99), max: at(1) };
  }),
  merge: ({ tag, n, keys, keep, several }) => withQueue(tag, async (queue) => {
    const answer = await inBulk(queue, n, (i) => ({
      name: "work", data: payload(i),
      opts: { delay: 600_000, deduplication: deduplication[keep](`key:${i % keys}`), ...gone },
    }), several ? 2 : 1);
    return { ...answer, left: await queue.getDelayedCount() };
  }),
};

for await (const line of createInterface({ input: process.stdin })) {
  const { step, ...words } = JSON.parse(line);
  let answer;
  try { answer = steps[step] ? await steps[step](words) : { absent: true }; }
  catch (error) { answer = { error: String(error).slice(0, 300) }; }
  process.stdout.write(JSON.stringify(answer) + "\n");
}
process.exit(0);
