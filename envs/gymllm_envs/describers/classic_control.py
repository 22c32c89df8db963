"""CartPole, MountainCar, Acrobot and Pendulum: named numbers."""

from __future__ import annotations

from gymllm.adapters import register_describer

MODULE = "gymnasium.envs.classic_control"
CAR_FIELDS = ("position", "velocity")
CAR_RULES = (
    "A car stands in a valley whose lowest point is at position -0.52. Get it up the right hill, to "
    "position {goal}. The motor is too weak to climb it at once: swing back and forth to gather speed."
)


def register() -> None:
    """Registers them all."""
    register_describer(
        env_class=f"{MODULE}.cartpole:CartPoleEnv",
        fields=(
            "cart position",
            "cart velocity",
            "pole angle (radians, positive: leans right)",
            "pole angular velocity",
        ),
        action_names=("left", "right"),
        instructions=(
            "A pole stands on a cart. Push the cart left or right so that the pole stays up as long as "
            "it can; each step earns 1. It ends when the pole leans more than 0.2095 radians (12 "
            "degrees) to either side or the cart's position leaves -2.4 to 2.4."
        ),
    )
    register_describer(
        env_class=f"{MODULE}.mountain_car:MountainCarEnv",
        fields=CAR_FIELDS,
        action_names=("left", "coast", "right"),
        instructions=f"{CAR_RULES.format(goal=0.5)} Each step costs 1; coast lets the motor rest.",
    )
    register_describer(
        env_class=f"{MODULE}.continuous_mountain_car:Continuous_MountainCarEnv",
        fields=CAR_FIELDS,
        instructions=(
            f"{CAR_RULES.format(goal=0.45)} The action is the motor's force: below 0 to the left, above "
            "0 to the right. Arriving earns 100; force costs a tenth of its square a step."
        ),
    )
    register_describer(
        env_class=f"{MODULE}.acrobot:AcrobotEnv",
        fields=(
            "cosine of the upper link's angle",
            "sine of the upper link's angle",
            "cosine of the lower link's angle to the upper",
            "sine of the lower link's angle to the upper",
            "angular velocity of the upper link",
            "angular velocity of the lower link",
        ),
        action_names=("minus", "none", "plus"),
        instructions=(
            "Two links hang from a fixed point, one below the other; angle 0 is straight down. Swing "
            "the free end up above one link's length over the fixed point. The action is the torque on "
            "the joint between them: minus is -1, none 0, plus 1. Each step costs 1."
        ),
    )
    register_describer(
        env_class=f"{MODULE}.pendulum:PendulumEnv",
        fields=("cosine of the angle", "sine of the angle", "angular velocity"),
        instructions=(
            "Swing a pendulum upright, to angle 0, and keep it there with little torque. The action is "
            "the torque; positive turns it counterclockwise."
        ),
    )
