/** Series with axes of their own, brought to one axis with gaps, as the charts take them. */

/**
 * @param {{x: number[], values: (number|null)[]}[]} series Each with a rising axis.
 * @returns {{x: number[], columns: (number|null)[][]}}
 */
export function aligned(series) {
  const x = [...new Set(series.flatMap((each) => each.x))].sort((one, other) => one - other);
  const columns = series.map((each) => {
    const known = new Map(each.x.map((place, index) => [place, each.values[index]]));
    return x.map((place) => known.get(place) ?? null);
  });
  return { x, columns };
}

/**
 * Exponentially smoothed values. What counts is how many records lie between two values, so that a rare one is not
 * outweighed by an old one.
 */
export function smoothed(values, numbers, records) {
  let [mean, since] = [null, 0];
  return values.map((value, index) => {
    since += numbers[index];
    if (value == null) return null;
    const keep = mean === null ? 0 : Math.exp(-since / records);
    mean = keep === 0 ? value : keep * mean + (1 - keep) * value;
    since = 0;
    return mean;
  });
}
