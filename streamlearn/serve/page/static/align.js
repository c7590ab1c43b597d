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

/** The points at which a column has a value. */
export function present(x, values) {
  const indices = values.flatMap((value, index) => (value == null ? [] : [index]));
  return { x: indices.map((index) => x[index]), values: indices.map((index) => values[index]) };
}

/** Exponentially smoothed values, weighted by how many records each stands for. */
export function smoothed(values, weights, records) {
  let mean = null;
  return values.map((value, index) => {
    if (value == null) return null;
    const keep = mean === null ? 0 : Math.exp(-weights[index] / records);
    mean = keep === 0 ? value : keep * mean + (1 - keep) * value;
    return mean;
  });
}
