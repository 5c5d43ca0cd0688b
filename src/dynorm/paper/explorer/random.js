// NumPy's legacy generator: a seed gives the same sample as numpy.random.RandomState(seed).randn().

/** The Mersenne Twister MT19937, seeded with one 32-bit number. */
class RandomState {
  constructor(seed) {
    this.key = new Uint32Array(624);
    this.key[0] = seed;
    for (let i = 1; i < 624; i++) {
      const last = this.key[i - 1];
      this.key[i] = Math.imul(1812433253, last ^ (last >>> 30)) + i;
    }
    this.position = 624;
    this.spare = null;
  }

  /** C standard normal numbers, by Marsaglia's polar method; every second one comes from the pair before. */
  normals(count) {
    return Float64Array.from({ length: count }, () => this.normal());
  }

  normal() {
    if (this.spare !== null) {
      const spare = this.spare;
      this.spare = null;
      return spare;
    }
    let first, second, square;
    do {
      first = 2 * this.uniform() - 1;
      second = 2 * this.uniform() - 1;
      square = first * first + second * second;
    } while (square >= 1 || square === 0);
    const factor = Math.sqrt((-2 * Math.log(square)) / square);
    this.spare = factor * first;
    return factor * second;
  }

  /** A number in [0, 1) with 53 random bits. */
  uniform() {
    const high = this.next() >>> 5;
    const low = this.next() >>> 6;
    return (high * 67108864 + low) / 9007199254740992;
  }

  next() {
    if (this.position === 624) this.twist();
    let y = this.key[this.position++];
    y ^= y >>> 11;
    y ^= (y << 7) & 0x9d2c5680;
    y ^= (y << 15) & 0xefc60000;
    return (y ^ (y >>> 18)) >>> 0;
  }

  twist() {
    const key = this.key;
    for (let i = 0; i < 624; i++) {
      const y = (key[i] & 0x80000000) | (key[(i + 1) % 624] & 0x7fffffff);
      key[i] = key[(i + 397) % 624] ^ (y >>> 1) ^ (y & 1 ? 0x9908b0df : 0);
    }
    this.position = 0;
  }
}
