// Reads of a tab, of which only the newest of each kind counts: answers that were overtaken are dropped.

export class Latest {
  constructor(app) {
    this.app = app;
    this.counts = new Map();
  }

  /** Read a path below /ui/api and pass on the answer, unless the same kind was read again meanwhile. */
  async read(kind, path, query, take, always = () => {}) {
    const count = (this.counts.get(kind) ?? 0) + 1;
    this.counts.set(kind, count);
    try {
      const told = await this.app.api.get(path, query);
      if (this.counts.get(kind) === count) take(told);
    } catch (problem) {
      if (this.counts.get(kind) === count && problem.status !== 401) this.app.tellConnection(problem.message);
    } finally {
      always();
    }
  }
}
