"""A launch on TPU VMs: slices are created, the program is followed and restarted, results collected, slices deleted."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field

from perex_t5x.cli import console
from perex_t5x.errors import ConfigError, Reason, TrainingError
from perex_t5x.launching import collect
from perex_t5x.launching.gcloud import logs, resource
from perex_t5x.launching.gcloud.bucket import GcloudFolder
from perex_t5x.launching.gcloud.logs import Ended, Follower
from perex_t5x.launching.gcloud.resource import GONE, Description
from perex_t5x.launching.gcloud.steps import Bundle, ExistsError, Steps
from perex_t5x.launching.request import Request
from perex_t5x.launching.shell import Leftovers, say, with_notes
from perex_t5x.launching.spec import FINAL_REASONS

_MOST_CHECKS = 20  # of slices on which nothing is started yet: another launch may be about to


@dataclass
class Options:
    """Flags of this launcher alone."""

    out: str
    wait_hours: float = 24.0
    python: str | None = None
    create_flags: tuple[str, ...] = ()
    detach: bool = False


@dataclass
class Session:
    """
    Attributes:
      commit: for the labels of new slices.
      bundle: what the hosts download.
    """

    steps: Steps
    request: Request
    options: Options
    commit: str
    bundle: Bundle
    _restarts: int = 0
    _follower: Follower = field(init=False)
    _named: bool = False  # whether the slices are deleted or named elsewhere

    def __post_init__(self) -> None:
        self._follower = Follower(self.steps)

    def prepare(self) -> None:
        """Copies, installs and starts the program on existing slices."""
        self.steps.copy(self.bundle)
        self.steps.install(self.options.python)
        self.steps.start(self.request.secrets)

    def make(self, leftovers: Leftovers) -> None:
        """Creates the slices and starts the program on them. Until it runs, any failure deletes them.

        Spot slices that are preempted before it runs are replaced by new ones.
        """
        while True:
            leftovers.add(self.steps.target.what, self.steps.target.delete())
            try:
                self.steps.create(
                    self.request, self.steps.target.create(self.request, self.commit, self.options.create_flags)
                )
            except ExistsError as e:
                leftovers.keep(self.steps.target.what)  # another launch has just created it
                e.add_note(self.steps.target.still_there)
                raise
            # The checks take minutes: here at least one of two launches into one folder, under two names, sees the other.
            check_folder(self.request, self.steps)
            try:
                self.steps.wait(self.options.wait_hours)
                self.prepare()
                break
            except TrainingError:
                if not self.steps.preempted():
                    raise
            say("the slices were preempted before the program ran")
            self._count()
            self.steps.delete()
        leftovers.keep(self.steps.target.what)

    def _count(self) -> None:
        """Counts a restart; one too many is an error."""
        self._restarts += 1
        if self._restarts > self.request.max_restarts:
            raise TrainingError(
                f"interrupted {self._restarts} times, --max_restarts={self.request.max_restarts}. The same launch command "
                "resumes from what is saved."
            )
        say(f"restarting ({self._restarts} of at most {self.request.max_restarts} times)")

    def run(self) -> int:
        """Follows the program to its end; returns the exit code of the launch."""
        try:
            with Leftovers(self.steps.commands):  # SIGTERM acts as Ctrl-C
                return self._run()
        except KeyboardInterrupt as e:
            if self._named:
                raise
            told = f"{str(e) or 'interrupted'}: the run continues without being followed."
            raise with_notes(KeyboardInterrupt(told), *self._ways()) from None
        except Exception as e:
            if not self._named:
                e.add_note(self.steps.target.still_there)
            raise

    def _ways(self) -> list[str]:
        """How to continue with a run that is no longer followed; the last line says how to delete it."""
        where = shlex.join([f"--name={self.request.name}", *self.steps.target.where])
        tool = "launch/gcloud_tpu.py"
        return [f"follow it:  {tool} follow {where}", f"stop it:    {tool} stop {where}", self.steps.target.still_there]

    def _run(self) -> int:
        while True:
            ended = self._follow()
            if ended.reason is Reason.DONE or ended.reason is Reason.SOME_FAILED:
                return self._finish(ended.reason)
            if ended.reason is Reason.CONFIGURATION:
                self._give_up(ConfigError("the program ended with a configuration error (exit code 2), see above."))
            if ended.reason is Reason.STOPPED:
                self._give_up(KeyboardInterrupt("the program was asked to stop; the same launch command resumes it."))
            if ended.reason is Reason.NO_PROGRESS:
                failed = "the program failed three times in a row without a newer checkpoint (exit code 9), see above."
                self._give_up(TrainingError(failed))
            if ended.reason in FINAL_REASONS:
                self._give_up(TrainingError(f"the program ended with {ended}: a restart would end in the same way."))
            if ended.reason is Reason.INTERRUPTED:
                self._named = True
                stopped = KeyboardInterrupt("the program was stopped; the same launch command resumes it.")
                raise with_notes(stopped, self.steps.target.still_there)
            if ended.how == logs.DELETED:  # by hand, to stop everything: created again, they would cost unnoticed
                self._named = True
                raise KeyboardInterrupt(
                    f"{self.steps.target.what} was deleted, and not by this launch. The same launch command resumes from "
                    "what is saved."
                )
            if ended.how == logs.PREEMPTED:
                say("the slices were preempted")
            elif ended.how != logs.UNSTARTED:
                say(f"the program ended with {ended}")
            try:
                if ended.how != logs.UNSTARTED:  # that is its first start
                    self._count()
            except TrainingError as e:
                self._give_up(e)
            self._again(ended)

    def _follow(self) -> Ended:
        for _ in range(_MOST_CHECKS):
            ended = self._follower.follow()
            if ended.how != logs.UNSTARTED:
                break
            say("nothing has been started there yet")
            self.steps.sleep(self.steps.poll)
        return ended

    def _again(self, ended: Ended) -> None:
        self._named = True
        with Leftovers(self.steps.commands, self.request.keep) as leftovers:
            leftovers.add(self.steps.target.what, self.steps.target.delete())
            if ended.how == logs.PREEMPTED:
                self.steps.delete()
                self.make(leftovers)
                self._follower = Follower(self.steps)  # its log is new
            elif ended.how == logs.UNSTARTED:
                self.prepare()
            else:
                if ended.how == logs.LOST or ended.reason is Reason.KILLED:
                    self._keep_logs(self.bundle.folder)
                self.steps.stop()  # what still runs on other hosts
                self.steps.start(self.request.secrets)
            leftovers.keep(self.steps.target.what)
        self._named = False

    def _give_up(self, error: BaseException) -> None:
        """Deletes the slices, or names them, and raises."""
        self._named = True
        with Leftovers(self.steps.commands, self.request.keep) as leftovers:
            leftovers.add(self.steps.target.what, self.steps.target.delete())
            self._keep_logs(self.bundle.folder)
            raise error

    def _keep_logs(self, url: str) -> None:
        """Stores logs that the workers have not stored, and shows the first error of all hosts."""
        try:
            self.steps.keep_logs(url)
            error = GcloudFolder(url, self.steps.commands, self.steps.target.project).first_error()
        except (TrainingError, ConfigError) as e:  # the slices cost money, and are deleted anyway
            say(f"not all logs are stored, or can be read: {e}")
            return
        if error is not None:
            say(f"first error: {error}\n{error.traceback}")

    def _finish(self, reason: Reason) -> int:
        say("all jobs have ended, some of them failed" if reason is Reason.SOME_FAILED else "all jobs are done")
        self._named = True
        with Leftovers(self.steps.commands, self.request.keep) as leftovers:
            leftovers.add(self.steps.target.what, self.steps.target.delete())
            collect.collect(self.request.work.root, self.request.name, self.options.out, self.steps.commands)
            if self.request.keep:
                say(self.steps.target.still_there)
            else:
                self.steps.delete()
        return 0


def check_folder(request: Request, steps: Steps, listed: Sequence[Description] | None = None) -> None:
    """Raises `ConfigError` if a launch of another name writes into the same folder."""
    for other in steps.resources() if listed is None else listed:
        same_folder = other.labels.get(resource.LABEL_RUN) == request.work.fingerprint
        if same_folder and other.launch != request.name and other.exists_or_pending:
            raise ConfigError(
                f"{request.work.root} is written by the launch {other.launch!r}, which is {other.state}. Follow it with "
                f"--name={other.launch}, delete it, or choose another folder."
            )


def find_existing(request: Request, steps: Steps, listed: Sequence[Description] | None = None) -> Description:
    """The existing launch of this name and folder, to be followed; `GONE` if there is none.

    A failed or suspended one of ours, which only uses up quota, is deleted.

    Raises:
      ConfigError: the name or the folder is taken, or the user cannot be asked.
    """
    existing = steps.describe()
    check_folder(request, steps, listed)
    if existing == GONE:
        return GONE
    if not existing.ours:
        raise ConfigError(f"{steps.target.what} exists and was not created by a launch. Choose another --name.")
    if existing.labels.get(resource.LABEL_RUN) != request.work.fingerprint:
        raise ConfigError(
            f"{steps.target.what} belongs to a launch into another folder than {request.work.root}. Choose another --name."
        )
    if existing.slices != request.slices and existing.exists_or_pending:
        raise ConfigError(
            f"{steps.target.what} has {existing.slices} slice(s), and {request.slices} would be requested: use "
            f"--slices={existing.slices} to follow it, or delete it first."
        )
    if not existing.exists_or_pending:
        say(f"{steps.target.what} is {existing.state}: it is deleted and created again.")
        steps.delete()
        return GONE
    say(f"{steps.target.what} exists already: {existing.state}.")
    if not request.yes:
        if not console.is_interactive():
            raise ConfigError(
                f"this launch is running already. To follow it: launch/gcloud_tpu.py follow --name={request.name} "
                f"{' '.join(steps.target.where)}, or give --yes, which also restarts it if it is preempted."
            )
        console.confirm("Follow it?", refused="Nothing was created.")
    return existing
