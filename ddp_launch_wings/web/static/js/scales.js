// How the world map colors ranks: by health, or by one of their values.

import { duration, mebibytes, percent } from "./format.js";
import { color } from "./theme.js";

const LEVELS = ["well", "warn", "bad", "c7"];
const LEVEL_WORDS = ["well", "slow", "bad", "not known"];
const PHASES = {
  data: "c3", forward: "c1", backward: "c4", comm: "c5", optimizer: "c2", checkpoint: "c3", evaluate: "c2", section: "c6",
  idle: "c7", starting: "c6", exiting: "c7", runs: "c6",
};

// From little to much, for light and for dark.
const RAMP = { light: [[222, 232, 250], [91, 141, 222], [28, 74, 168]], dark: [[31, 45, 76], [70, 112, 200], [165, 196, 255]] };
const HEAT = {
  light: [[206, 231, 217], [247, 206, 128], [199, 54, 43]], dark: [[28, 66, 47], [190, 135, 38], [255, 112, 98]],
};

function mixed(stops, share) {
  const at = Math.max(0, Math.min(1, share)) * (stops.length - 1);
  const left = Math.min(stops.length - 2, Math.floor(at)), part = at - left;
  const [a, b] = [stops[left], stops[left + 1]];
  return `rgb(${a.map((value, n) => Math.round(value + (b[n] - value) * part)).join(" ")})`;
}

const theme = () => (document.documentElement.dataset.theme === "dark" ? "dark" : "light");
const heat = (share) => mixed(HEAT[theme()], share);
const ramp = (share) => mixed(RAMP[theme()], share);

const gradient = (paint, low, high) => ({ gradient: [0, 0.25, 0.5, 0.75, 1].map(paint), low, high });

// Each has a name, a color for a row, a value in words, and a legend.
export const SCALES = {
  health: {
    title: "Health",
    paint: (row, state) => color(LEVELS[state.summary.levels.get(row[0]).level]),
    words: (row, state) => state.summary.levels.get(row[0]).words,
    legend: (state) => ({ items: LEVELS.map((name, n) => [color(name), `${LEVEL_WORDS[n]} ${state.summary?.counts[n] ?? 0}`]) }),
  },
  lag: {
    title: "Lag",
    paint: (row, state) => heat(lag(row, state)),
    words: (row, state) => {
      const { behind } = state.summary.levels.get(row[0]);
      return `${behind} steps behind, quiet for ${duration(row[state.column.quiet_s])}`;
    },
    legend: () => gradient(heat, "up to date", "far behind, or no progress"),
  },
  time: {
    title: "Own time",
    paint: (row, state) => heat((row[state.column.ratio] - 0.95) / 0.65),
    words: (row, state) => `own time ${duration(row[state.column.own_ms] / 1000)} per step, ${row[state.column.ratio].toFixed(2)}× that of its peers`,
    legend: () => gradient(heat, "as its peers", "1.6× their own time"),
  },
  communication: {
    title: "Communication",
    paint: (row, state) => ramp(row[state.column.share] ?? 0),
    words: (row, state) => `${percent(row[state.column.share])} of the time in collectives`,
    legend: () => gradient(ramp, "0 %", "100 % of the time in collectives"),
  },
  phase: {
    title: "Phase",
    paint: (row, state) => color(PHASES[row[state.column.phase]] || "bad"),
    words: (row, state) => row[state.column.phase],
    legend: (state) => ({ items: phases(state) }),
  },
  memory: {
    title: "Memory",
    paint: (row, state) => ramp(row[state.column.memory_mib] / most(state)),
    words: (row, state) => mebibytes(row[state.column.memory_mib]),
    legend: (state) => gradient(ramp, "0", mebibytes(most(state))),
  },
};

function lag(row, state) {
  const { behind } = state.summary.levels.get(row[0]);
  return Math.max(behind / 6, (row[state.column.quiet_s] - 1) / state.summary.quiet);
}

const most = (state) => state.rows.reduce((most, row) => Math.max(most, row[state.column.memory_mib]), 1);

function phases(state) {
  const counts = {};
  for (const row of state.rows) counts[row[state.column.phase]] = (counts[row[state.column.phase]] || 0) + 1;
  return Object.entries(counts).map(([phase, number]) => [color(PHASES[phase] || "bad"), `${phase} ${number}`]);
}
