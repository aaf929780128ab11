"""The columns of a row of coefficients, which `adam.coefficients` makes and every step kernel reads."""

ACTIVE, SCALE, L2, KEEP1, FADE1, REST1, BETA2, REST2, DECAY, STEP_SIZE, ROOT_SCALE, EPS = range(12)
NUM_COEF = 12
