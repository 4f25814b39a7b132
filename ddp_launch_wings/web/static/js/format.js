// Numbers and times as text, in the same units as ddpctl.

export function duration(seconds) {
  if (!(seconds > 0)) return "–";
  if (seconds < 1e-3) return `${Math.round(seconds * 1e6)} µs`;
  if (seconds < 1) return `${precise(seconds * 1e3)} ms`;
  if (seconds < 100) return `${precise(seconds)} s`;
  if (seconds < 6000) return `${Math.round(seconds / 60)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

export function precise(value) {
  return value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2);
}

export const sinceThen = (seconds) => (seconds < 0.1 ? "now" : duration(seconds));

export const percent = (share) => (share === null || share === undefined ? "–" : `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`);

export const count = (number, what) => `${number.toLocaleString("en")} ${what}${number === 1 ? "" : "s"}`;

export function mebibytes(mib) {
  if (!mib) return "–";
  return mib < 1024 ? `${mib} MiB` : `${precise(mib / 1024)} GiB`;
}

export function bytes(number) {
  const power = number >= 1 ? Math.min(5, Math.floor(Math.log2(number) / 10)) : 0;
  return `${power ? precise(number / 1024 ** power) : Math.round(number)} ${["B", "KiB", "MiB", "GiB", "TiB", "PiB"][power]}`;
}

const clock = new Intl.DateTimeFormat([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
const day = new Intl.DateTimeFormat([], { month: "short", day: "numeric" });

export const time = (seconds) => clock.format(new Date(seconds * 1000));

export function moment(seconds) {
  const date = new Date(seconds * 1000);
  const today = new Date().toDateString() === date.toDateString();
  return today ? clock.format(date) : `${day.format(date)} ${clock.format(date)}`;
}

const KINDS = { running: "good", succeeded: "good", failed: "bad", stopping: "warn", forming: "info", storing: "info" };

export const kindOfPhase = (phase) => KINDS[phase] || "info";
