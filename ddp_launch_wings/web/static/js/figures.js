// From sums since the start of the job to values over time.
//
// A point of the service has the steps that a rank has finished, and the sums of the time of all ranks: by class, and
// with hidden communication. The differences of two points are divided: what lies between can be left out.

const CLASSES = [
  "start", "data", "forward", "backward", "communication", "optimizer", "checkpoint", "evaluation", "waiting",
  "detect", "stop", "meet", "fork", "init", "redo", "idle",
];
const FIRST = 4; // of the classes in a point
const HIDDEN = FIRST + CLASSES.length;
const at = Object.fromEntries(CLASSES.map((name, n) => [name, FIRST + n]));
const IN_STEPS = ["data", "forward", "backward", "communication", "optimizer", "waiting", "redo", "idle"];

export const GROUPS = [
  ["Compute", "c1", ["forward", "backward", "optimizer"]],
  ["Communication, exposed", "c4", ["communication"]],
  ["Waiting for others", "c3", ["waiting"]],
  ["Data", "c5", ["data"]],
  ["Checkpoint, evaluation", "c2", ["checkpoint", "evaluation"]],
  ["Lost to stops and restarts", "bad", ["detect", "stop", "meet", "fork", "init", "redo"]],
  ["Start, idle", "c7", ["start", "idle"]],
];
const TRAINING = ["forward", "backward", "communication", "optimizer"];

const sum = (point, names) => names.reduce((total, name) => total + point[at[name]], 0);
const whole = (point) => point.slice(FIRST, HIDDEN).reduce((total, seconds) => total + seconds, 0);

// One value per interval: `shares` always, the figures of steps only between two reports of one generation that have
// steps. A script that resumes numbers its first step, so there is no count of steps until then.
export function intervals(points) {
  const found = [];
  const hides = (points.at(-1)?.[HIDDEN] ?? 0) > 0; // otherwise it is not known: C++ code of torch starts the collectives
  for (let n = 1; n < points.length; n++) {
    const now = points[n];
    let back = n - 1;
    const wider = points[back - 1];
    if (wider?.[1] === now[1] && wider[3] > 0 && now[0] - points[back][0] < 15) back -= 1; // agents report every 5 s
    const before = points[back];
    const total = whole(now) - whole(before);
    if (total <= 0) continue;
    const share = (names) => Math.max(0, (sum(now, names) - sum(before, names)) / total);
    const steps = now[1] === before[1] && before[3] > 0 ? now[3] - before[3] : 0;
    const inSteps = sum(now, IN_STEPS) - sum(before, IN_STEPS);
    found.push({
      at: now[0],
      shares: GROUPS.map(([, , names]) => share(names)),
      goodput: share(TRAINING),
      exposed: share(["communication"]),
      hidden: hides ? Math.max(0, (now[HIDDEN] - before[HIDDEN]) / total) : null,
      waiting: share(["waiting"]),
      rate: steps > 0 ? (steps * now[2]) / total : null,
      step_s: steps > 0 && inSteps > 0 ? inSteps / now[2] / steps : null,
    });
  }
  return found;
}

export function goodput(points) {
  const last = points.at(-1);
  return last && whole(last) > 0 ? sum(last, TRAINING) / whole(last) : null;
}
