// How numbers are written.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const tenth = new Intl.NumberFormat("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 });

export const NOTHING = "–";

export const count = (value) => whole.format(value);
export const rate = (value) => (value < 100 ? tenth : whole).format(value);
export const percent = (share) => `${tenth.format(share * 100)} %`;

/** A time span in the unit that suits it. */
export function span(ms) {
  if (ms < 100) return `${tenth.format(ms)} ms`;
  if (ms < 10_000) return `${whole.format(ms)} ms`;
  return `${tenth.format(ms / 1000)} s`;
}

export function duration(seconds) {
  const [days, hours, minutes] = [seconds / 86400, (seconds / 3600) % 24, (seconds / 60) % 60].map(Math.floor);
  if (days) return `${days} d ${hours} h`;
  if (hours) return `${hours} h ${minutes} min`;
  return minutes ? `${minutes} min` : `${Math.floor(seconds)} s`;
}
